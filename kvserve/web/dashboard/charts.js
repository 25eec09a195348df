// The page's charts, drawn by uPlot in the colours of the style sheet: bars that stand on one another, computed tokens
// hatched. It knows columns of numbers, and nothing of the server.

import { short } from "./draw.js";

const round = (number) => short(number).replace(/\.0+ /, " ");

const dark = matchMedia("(prefers-color-scheme: dark)");
const FONT = "12px system-ui, sans-serif";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A chart in a box, made anew for another width or other colours. `options` makes uPlot's own; `hover` hears of the place. */
export class Plot {
  constructor(box, options, hover, pick = () => {}) {
    Object.assign(this, { box, options, hover, pick, plot: null, look: "", data: null });
    const again = () => {
      if (!box.isConnected) this.leave();
      else if (this.data) this.draw(this.data);
    };
    this.sizes = new ResizeObserver(again);
    this.sizes.observe(box);
    this.leave = () => {
      this.sizes.disconnect();
      dark.removeEventListener("change", again);
      this.plot?.destroy();
      this.plot = null;
    };
    dark.addEventListener("change", again);
  }

  draw(data) {
    this.data = data;
    const width = this.box.clientWidth;
    if (!width) return;
    const look = `${width} ${dark.matches}`;
    if (this.plot && look === this.look) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.look = look;
    const hooks = { setCursor: [(plot) => this.hover(plot.cursor.idx)] };
    const options = this.options();
    this.plot = new uPlot({ width, legend: { show: false }, cursor: CURSOR, padding: [10, 8, 0, 4], ...options,
      hooks: { ...hooks, ...options.hooks } }, data, this.box);
    this.plot.over.addEventListener("click", () => this.pick(this.plot.cursor.idx));
  }

  redraw() {
    this.plot?.redraw(false);
  }
}

const CURSOR = { y: false, drag: { x: false, y: false }, points: { show: false } };

/** Columns of a time's steps: reused and computed tokens, and the share. */
export function activityOptions(height, label, from, to, timeText) {
  return {
    height,
    scales: { x: { range: () => [from(), to()] }, y: { range: (_, __, most) => [0, Math.max(10, most * 1.05)] }, share: { range: [0, 100] } },
    axes: [
      axis({ values: (_, times) => times.map(timeText), space: 70, size: 30 }),
      axis({ label: label(), size: 56, values: (_, numbers) => numbers.map(round) }),
      axis({ scale: "share", side: 1, label: "share reused", size: 52, grid: { show: false },
        splits: () => [0, 25, 50, 75, 100], values: (_, numbers) => numbers.map((number) => `${number} %`) }),
    ],
    series: [
      {},
      { ...bars(1), fill: hatched },
      { ...bars(1), fill: () => colour("reused") },
      { scale: "share", stroke: () => colour("line"), width: 2, points: { show: true, size: 6, fill: () => colour("line") } },
    ],
  };
}

/** Columns of a session's turns: reused, computed and written tokens; `chosen` says which one is framed. */
export function turnOptions(height, chosen) {
  return {
    height,
    scales: { x: { time: false, range: (_, first, last) => [first - 0.6, Math.max(last, first + 9) + 0.6] },
      y: { range: (_, __, most) => [0, Math.max(10, most * 1.05)] } },
    axes: [
      axis({ label: "turn", incrs: [1, 2, 5, 10, 20, 50], size: 30, labelSize: 18 }),
      axis({ label: "tokens", size: 56, values: (_, numbers) => numbers.map(round) }),
    ],
    series: [{}, { ...bars(0), fill: () => colour("written") }, { ...bars(0), fill: hatched }, { ...bars(0), fill: () => colour("reused") }],
    hooks: { draw: [(plot) => frame(plot, chosen())] },
  };
}

const bars = (align) => ({ width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 40], align }) });

function axis(more) {
  const stroke = () => colour("soft");
  const grid = { stroke: () => colour("edge"), width: 1 };
  return { stroke, font: FONT, labelFont: FONT, labelSize: 20, ticks: grid, ...more, grid: { ...grid, ...more.grid } };
}

/** Stripes, so that computed tokens are told from reused ones without their colour. */
function hatched(plot) {
  const tile = document.createElement("canvas");
  const side = 8 * devicePixelRatio;
  tile.width = tile.height = side;
  const pen = tile.getContext("2d");
  pen.fillStyle = colour("computed");
  pen.fillRect(0, 0, side, side);
  pen.strokeStyle = colour("card");
  pen.lineWidth = side / 5;
  for (const shift of [-side, 0, side]) {
    pen.beginPath();
    pen.moveTo(shift, side);
    pen.lineTo(shift + side, 0);
    pen.stroke();
  }
  return plot.ctx.createPattern(tile, "repeat");
}

/** A frame around the bar of the chosen turn. */
function frame(plot, index) {
  if (index === null || plot.data[0][index] === undefined) return;
  const x = plot.valToPos(plot.data[0][index], "x", true);
  const width = Math.min(40 * devicePixelRatio, Math.abs(plot.valToPos(1, "x", true) - plot.valToPos(0, "x", true)));
  const top = plot.valToPos(plot.data[1][index], "y", true) - 3;
  plot.ctx.save();
  plot.ctx.strokeStyle = colour("ink");
  plot.ctx.lineWidth = 2 * devicePixelRatio;
  plot.ctx.strokeRect(x - width / 2, top, width, plot.bbox.top + plot.bbox.height - top);
  plot.ctx.restore();
}
