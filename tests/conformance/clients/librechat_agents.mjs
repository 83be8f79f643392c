// LibreChat's agents; agent_loop.py says what a loop is.
import { readFileSync, writeFileSync } from "node:fs";
import { tool } from "@langchain/core/tools";
import { createAgentSession, Providers } from "@librechat/agents";
import { z } from "zod";

const { BASE_URL: baseURL, MODEL: model, FILE, FIRST, SECOND } = process.env;
const read = tool(async () => readFileSync(FILE, "utf8"), {
  name: "read_file",
  description: "Reads a file",
  schema: z.object({ path: z.string() }),
});
const edit = tool(
  async (sent) => {
    writeFileSync(FILE, readFileSync(FILE, "utf8").replace(sent.old, sent.new));
    return "done";
  },
  {
    name: "edit_file",
    description: "Replaces a text in a file",
    schema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
  },
);
const session = await createAgentSession({
  graphConfig: {
    type: "standard",
    instructions: "Edit files.",
    tools: [read, edit],
    llmConfig: {
      provider: Providers.OPENAI,
      model,
      apiKey: "none",
      streaming: true,
      configuration: { baseURL },
    },
  },
});
for (const question of [FIRST, SECOND]) {
  const result = await session.run(question);
  console.log(`\n${result.text.split("\n").at(-1)}`);
  await session.resumeSession(); // the next turn continues the session on disk
}
process.exit(0);
