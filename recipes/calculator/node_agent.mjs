// The calculator agent in another language: node's own fetch, no packages.
//
//   agent.command: [node, node_agent.mjs]

import { readFileSync } from "node:fs";

const task = JSON.parse(readFileSync(process.env.AREAL_RAY_TASK, "utf8"));
const messages = [...task.messages];

async function ask() {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      authorization: `Bearer ${process.env.OPENAI_API_KEY}`,
    },
    body: JSON.stringify({ model: process.env.OPENAI_MODEL, messages }),
  });
  const reply = await response.json();
  if (!response.ok) throw new Error(reply.error.message);
  return reply.choices[0].message;
}

function calculate(expression) {
  const found = /^\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*$/.exec(expression);
  if (!found) return "error";
  const [first, second] = [BigInt(found[1]), BigInt(found[3])];
  return String({ "+": first + second, "-": first - second, "*": first * second }[found[2]]);
}

const reply = await ask();
const call = /<tool>(.*?)<\/tool>/s.exec(reply.content ?? "");
if (call) {
  messages.push(reply, { role: "tool", content: calculate(call[1]), tool_call_id: "sum" });
  await ask();
}
