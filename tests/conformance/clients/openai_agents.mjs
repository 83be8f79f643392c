// OpenAI's agents for JavaScript; agent_loop.py says what a loop is.
import { readFileSync, writeFileSync } from "node:fs";
import { Agent, MemorySession, Runner, setOpenAIAPI, tool } from "@openai/agents";
import { z } from "zod";

const { MODEL, FILE, FIRST, SECOND, API } = process.env;
setOpenAIAPI(API);
const agent = new Agent({
  name: "Editor",
  model: MODEL,
  instructions: "Edit files.",
  tools: [
    tool({
      name: "read_file",
      description: "Reads a file",
      parameters: z.object({ path: z.string() }),
      execute: async () => readFileSync(FILE, "utf8"),
    }),
    tool({
      name: "edit_file",
      description: "Replaces a text in a file",
      parameters: z.object({ path: z.string(), old: z.string(), new: z.string() }),
      execute: async (sent) => {
        writeFileSync(FILE, readFileSync(FILE, "utf8").replace(sent.old, sent.new));
        return "done";
      },
    }),
  ],
});
const runner = new Runner({ tracingDisabled: true });
const session = new MemorySession();
for (const question of [FIRST, SECOND]) {
  const result = await runner.run(agent, question, { session, stream: true });
  await result.completed;
  console.log(result.finalOutput);
}
