// The official MCP client over stdio, driven by lines: each input line is a
// JSON {name, arguments} tool call (or {list: true}), each output line its
// result with the milliseconds it took.
//
//   node client.mjs COMMAND [ARG...]
import { createInterface } from 'node:readline';
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StdioClientTransport } from '@modelcontextprotocol/sdk/client/stdio.js';

const [command, ...args] = process.argv.slice(2);
const started = performance.now();
const client = new Client({ name: 'abfleet-test', version: '1' });
await client.connect(new StdioClientTransport({ command, args, env: process.env, stderr: 'inherit' }));

const say = (value) => process.stdout.write(JSON.stringify(value) + '\n');
say({ ready: true, server: client.getServerVersion(), ms: performance.now() - started });

for await (const line of createInterface({ input: process.stdin })) {
  if (!line.trim()) continue;
  const call = JSON.parse(line);
  const t = performance.now();
  try {
    const result = call.list
      ? await client.listTools()
      : await client.callTool({ name: call.name, arguments: call.arguments ?? {} }, undefined, { timeout: 120_000 });
    say({ ms: performance.now() - t, result });
  } catch (e) {
    say({ ms: performance.now() - t, error: { code: e.code, message: e.message, data: e.data } });
  }
}
await client.close();
