// The parts of Observable Plot that report.js draws with; esbuild leaves the rest out.
export { barX, cell, dodgeY, dot, line, link, plot, pointer, ruleX, ruleY, text, tickX, tip } from "@observablehq/plot";
