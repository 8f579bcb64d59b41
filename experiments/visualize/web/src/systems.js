// The systems that are compared: each keeps its colour and its line on the whole page.

// Dashes in sixteenths of a rem.
const STYLES = {
  paged: { colour: "#0072b2", dash: [] },
  oracle: { colour: "#009e73", dash: [6, 3] },
  pow2: { colour: "#e69f00", dash: [2, 3] },
  max: { colour: "#d55e00", dash: [9, 3, 2, 3] },
  paged_static: { colour: "#cc79a7", dash: [12, 4] },
  max_static: { colour: "#8c8c8c", dash: [5, 2, 1, 2, 1, 2] },
};
// Those of the simulator, after the paper, and one of which only swapping is different.
const LIKE = {
  paged_swap: "paged", vllm: "paged", orca_oracle: "oracle", orca_pow2: "pow2",
  orca_max: "max", ft: "max_static",
};

/** The colour and the dashes of a system's line. */
export function systemStyle(name) {
  return STYLES[LIKE[name] ?? name];
}
