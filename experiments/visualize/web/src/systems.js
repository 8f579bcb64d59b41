// The systems that are compared: each keeps its colour on the whole page.

const COLOUR = {
  paged: "#0072b2", paged_swap: "#0072b2", oracle: "#009e73", pow2: "#e69f00",
  max: "#d55e00", paged_static: "#cc79a7", max_static: "#8c8c8c",
  vllm: "#0072b2", orca_oracle: "#009e73", orca_pow2: "#e69f00", orca_max: "#d55e00",
  ft: "#8c8c8c",
};

export function systemColour(name) {
  return COLOUR[name];
}
