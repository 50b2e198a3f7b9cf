// Colours that nearly everyone can distinguish: one hue from pale to strong for sizes, blue and orange for signs.
// Lightness alone orders them, so that grey prints work.

const LIGHT = {
  dark: false,
  paper: "#ffffff",
  raised: "#f6f7f9",
  ink: "#1c2430",
  soft: "#5c6776",
  line: "#d9dee5",
  accent: "#983706",
  select: "#d8590f",
  edge: "#123f7c",
  sizes: [[247, 249, 252], [198, 217, 240], [120, 170, 219], [45, 112, 181], [12, 58, 120], [6, 27, 66]],
  spreads: [[252, 249, 244], [248, 222, 184], [237, 171, 96], [201, 112, 27], [139, 65, 8], [76, 31, 3]],
  signs: [[122, 56, 4], [201, 112, 27], [248, 222, 184], [248, 248, 248], [198, 217, 240], [45, 112, 181], [6, 40, 96]],
};

const DARK = {
  dark: true,
  paper: "#12161c",
  raised: "#1b2129",
  ink: "#e8ecf1",
  soft: "#9aa6b4",
  line: "#333c48",
  accent: "#ffb483",
  select: "#ff8a3d",
  edge: "#8ec5ff",
  sizes: [[24, 30, 38], [26, 54, 92], [36, 94, 160], [74, 146, 217], [150, 200, 245], [232, 244, 255]],
  spreads: [[30, 26, 22], [84, 46, 12], [148, 82, 18], [211, 130, 50], [246, 190, 124], [255, 240, 220]],
  signs: [[255, 214, 170], [211, 130, 50], [84, 46, 12], [26, 30, 36], [26, 54, 92], [74, 146, 217], [200, 228, 255]],
};

// Okabe and Ito's, for kinds without an order; the last is for the remaining kinds.
export const KINDS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];

/** The colours of a theme, "light" or "dark". */
export function palette(theme) {
  return theme === "dark" ? DARK : LIGHT;
}

function mixed(ramp, part) {
  const place = Math.min(Math.max(part, 0), 1) * (ramp.length - 1);
  const low = Math.min(Math.floor(place), ramp.length - 2);
  const share = place - low;
  return ramp[low].map((from, i) => Math.round(from + share * (ramp[low + 1][i] - from)));
}

/** Relative luminance of a colour, as used for contrast ratios. */
function luminance(rgb) {
  const [r, g, b] = rgb.map((part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/**
 * A scale from values to colours.
 *
 * @param {object} theme from `palette`
 * @param {number} top the value that gets the strongest colour
 * @param {{kind?: "sizes"|"spreads"|"signs", log?: boolean}} options "signs" has −top at its other end; `log` covers
 *   three decades below the top
 */
export function scaled(theme, top, { kind = "sizes", log = false } = {}) {
  const ramp = theme[kind];
  const high = top > 0 ? top : 1;
  const size = log ? (value) => 1 + Math.log10(Math.max(value / high, 1e-3)) / 3 : (value) => value / high;
  const part = kind === "signs" ? (value) => 0.5 + 0.5 * Math.sign(value) * size(Math.abs(value)) : (value) => size(value);
  const table = Array.from({ length: 256 }, (_, i) => mixed(ramp, i / 255));
  const index = (value) => Math.min(Math.max(Math.round(255 * part(value)), 0), 255);
  return {
    top: high,
    kind,
    log,
    part: (value) => Math.min(Math.max(part(value), 0), 1),
    rgb: (value) => table[index(value)],
    css: (value) => `rgb(${table[index(value)].join(",")})`,
    /** The value at a place of the scale, 0 to 1. */
    value: (place) => {
      const back = (share) => high * (log ? (share <= 0 ? 0 : 10 ** (3 * (share - 1))) : share);
      return kind === "signs" ? Math.sign(place - 0.5) * back(Math.abs(2 * place - 1)) : back(place);
    },
    /** Ink that can be read on the colour of a value. */
    ink: (value) => (luminance(table[index(value)]) > 0.179 ? "#000000" : "#ffffff"), // where both have the same contrast
  };
}
