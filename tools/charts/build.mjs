// Bundles plot.mjs and collects the licence of every package that is in the bundle.
import { build } from "esbuild";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";

const assets = "../../src/fedmoe/report/assets";
const { metafile } = await build({
  entryPoints: ["plot.mjs"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plot",
  legalComments: "none",
  metafile: true,
  outfile: `${assets}/plot.min.js`,
});

const inside = Object.values(metafile.outputs)[0].inputs;
const packages = new Set(Object.keys(inside).map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]));
packages.delete(undefined);
const licences = [...packages].sort().map((name) => {
  const home = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${home}/package.json`, "utf8"));
  const file = readdirSync(home).find((entry) => /^licen[cs]e/i.test(entry));
  const text = file && existsSync(`${home}/${file}`) ? readFileSync(`${home}/${file}`, "utf8").trim() : "";
  return `${name} ${version} (${license})\n\n${text}\n`;
});
writeFileSync(`${assets}/plot.LICENSES.txt`, `plot.min.js holds parts of these packages.\n\n${licences.join("\n----\n\n")}`);
