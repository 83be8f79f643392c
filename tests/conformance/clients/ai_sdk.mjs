// The AI SDK with one of its providers; agent_loop.py says what a loop is.
import { readFileSync, writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL: baseURL, MODEL, FILE, FIRST, SECOND, PROVIDER } = process.env;
const apiKey = "none";
const model = {
  openai: () => createOpenAI({ baseURL, apiKey })(MODEL),
  anthropic: () => createAnthropic({ baseURL, apiKey })(MODEL),
  compatible: () => createOpenAICompatible({ name: "tandem", baseURL, apiKey })(MODEL),
}[PROVIDER]();
const tools = {
  read_file: tool({
    description: "Reads a file",
    inputSchema: z.object({ path: z.string() }),
    execute: async () => readFileSync(FILE, "utf8"),
  }),
  edit_file: tool({
    description: "Replaces a text in a file",
    inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
    execute: async (sent) => {
      writeFileSync(FILE, readFileSync(FILE, "utf8").replace(sent.old, sent.new));
      return "done";
    },
  }),
};
const messages = [];
for (const question of [FIRST, SECOND]) {
  messages.push({ role: "user", content: question });
  const result = streamText({ model, tools, messages, stopWhen: isStepCount(5) });
  const text = await result.text;
  messages.push(...(await result.responseMessages));
  console.log(text);
}
