// The JDK's HTTP client with its defaults: posts a file to a URL, and prints the answer.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;

public class Post {
  public static void main(String[] args) throws Exception {
    var request =
        HttpRequest.newBuilder(URI.create(args[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofFile(Path.of(args[1])))
            .build();
    var answer = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
    System.out.println(answer.body());
    System.exit(answer.statusCode() == 200 ? 0 : 1);
  }
}
