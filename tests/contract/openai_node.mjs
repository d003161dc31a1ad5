// The official Node SDK at its ordinary work: node openai_node.mjs URL MODEL TEXT. Exits with 0 when all is as expected.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const { default: OpenAI } = require("openai");
const [url, model, text] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: [{ type: "text", text: "hello" }] }];

const chat = await client.chat.completions.create({ model, messages, max_tokens: 50, logprobs: true, n: 2 });
assert.deepEqual(chat.choices.map((choice) => choice.message.content), [text, text]);
assert.equal(chat.choices[0].finish_reason, "length");
assert.ok(chat.choices[0].logprobs.content.length > 1);
assert.ok(chat.usage.completion_tokens > 1);
assert.ok(chat._request_id);

const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 50,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.ok(usage.prompt_tokens > 0);

const helper = client.chat.completions.stream({ model, messages, max_tokens: 50 });
let deltas = "";
helper.on("content", (delta) => (deltas += delta));
const final = await helper.finalChatCompletion();
assert.equal(final.choices[0].message.content, text);
assert.equal(deltas, text);

const completion = await client.completions.create({ model, prompt: "hello", max_tokens: 50, echo: true });
assert.equal(completion.choices[0].text, `hello${text}`);

const { data, response } = await client.chat.completions
  .create({ model, messages, max_tokens: 50 }, { headers: { "X-Request-ID": "mine" } })
  .withResponse();
assert.equal(response.headers.get("x-request-id"), "mine");
assert.equal(data.object, "chat.completion");

const models = [];
for await (const card of client.models.list()) models.push(card.id);
assert.deepEqual(models, [model]);

await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.code === "invalid_request",
);
await assert.rejects(
  client.chat.completions.create({ model: "another", messages }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);

const abandoned = await client.chat.completions.create({ model, messages, max_tokens: 50, stream: true });
for await (const _ of abandoned) break;
