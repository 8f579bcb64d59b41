// Colours of Okabe and Ito, which people with colour blindness can tell apart; beyond
// seven sequences the same colours come back with a pattern. Labels say it in words.

export const COLOURS = [
  "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7",
];
const PATTERNS = ["plain", "rising", "dots", "falling"];

/** Colour and pattern of a request or, in a group, of a sequence. */
export function paintOf(index) {
  return {
    colour: COLOURS[index % COLOURS.length],
    pattern: PATTERNS[Math.floor(index / COLOURS.length) % PATTERNS.length],
  };
}

/** A CSS background in which a paint can be recognised. */
export function cssPaint({ colour, pattern }) {
  const line = "rgba(0, 0, 0, 0.42)";
  const over = {
    plain: "",
    rising: `repeating-linear-gradient(135deg, ${line} 0 1.5px, transparent 1.5px 5px), `,
    falling: `repeating-linear-gradient(45deg, ${line} 0 1.5px, transparent 1.5px 5px), `,
    dots: `radial-gradient(${line} 1.2px, transparent 1.5px) 0 0 / 5px 5px, `,
  }[pattern];
  return `${over}${colour}`;
}

const made = new Map();

/**
 * A canvas fill of a paint. `scale`: device pixels of a CSS pixel, by which the context
 * is scaled; `grain`: how coarse the pattern is, 1 where a rem has 16 pixels.
 */
export function canvasPaint(context, { colour, pattern }, scale, grain) {
  if (pattern === "plain") return colour;
  const key = `${colour} ${pattern} ${scale * grain}`;
  if (!made.has(key)) {
    const size = Math.round(6 * scale * grain);
    const tile = document.createElement("canvas");
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour;
    pen.fillRect(0, 0, size, size);
    stroke(pen, pattern, size, "rgba(0, 0, 0, 0.42)");
    made.set(key, tile);
  }
  return tiled(context, made.get(key), scale);
}

/** A pattern whose tile has device pixels, in a context that is scaled. */
function tiled(context, tile, scale) {
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

/** Hatching for what is granted and never used. */
export function hatch(context, colour, scale, grain) {
  const key = `hatch ${colour} ${scale * grain}`;
  if (!made.has(key)) {
    const size = Math.round(6 * scale * grain);
    const tile = document.createElement("canvas");
    tile.width = tile.height = size;
    stroke(tile.getContext("2d"), "rising", size, colour);
    made.set(key, tile);
  }
  return tiled(context, made.get(key), scale);
}

function stroke(pen, pattern, size, colour) {
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = size / 4.5;
  if (pattern === "dots") {
    pen.beginPath();
    pen.arc(size / 2, size / 2, size / 4, 0, 2 * Math.PI);
    pen.fill();
    return;
  }
  const up = pattern === "rising";
  // Three lines, so that the tile fits itself at the corners.
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift, up ? size : 0);
    pen.lineTo(shift + size, up ? 0 : size);
    pen.stroke();
  }
}

/** A colour of the style sheet. */
export function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
