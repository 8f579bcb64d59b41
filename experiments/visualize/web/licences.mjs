// Prints a comment with the licences of what esbuild has bundled, from its metafile.
import { readFileSync } from "node:fs";

const inputs = Object.keys(JSON.parse(readFileSync(process.argv[2], "utf8")).inputs);
const packages = new Set(
  inputs.map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]).filter(Boolean),
);
const byText = new Map();
for (const name of [...packages].sort()) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  const text = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
  byText.set(text, [...(byText.get(text) ?? []), `${name} ${version}`]);
}
const parts = [...byText].map(([text, names]) => `${names.join(", ")}\n\n${text}`);
console.log(`/*! Bundled with this script:\n\n${parts.join("\n\n")}\n*/`);
