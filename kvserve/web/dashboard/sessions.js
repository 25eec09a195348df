// Sessions, folded, and the turns of those that the reader has opened: a chart, the cause of the turn that is chosen, and
// the same as a table.

import { askJson } from "./api.js";
import { Plot, turnOptions } from "./charts.js";
import { ago, at, clientName, clock, copyButton, count, keep, make, modelName, percent, plural, rate, say, seconds, short } from "./draw.js";

const NUM_SHOWN = 8;
let showsAll = false;
let shown = [];

at("more-sessions").addEventListener("click", () => {
  showsAll = !showsAll;
  showSessions(shown);
});

/** All that are known, the newest first; eight of them until the reader wants more. */
export function showSessions(sessions) {
  shown = sessions;
  say(at("num-sessions"), sessions.length ? `(${sessions.length})` : "");
  at("no-sessions").hidden = sessions.length > 0;
  at("more-sessions").hidden = sessions.length <= NUM_SHOWN;
  say(at("more-sessions"), showsAll ? "Show fewer" : `Show all ${sessions.length}`);
  const some = showsAll ? sessions : sessions.slice(0, NUM_SHOWN);
  keep(at("sessions"), some, (session) => session.id, createSession, updateSession);
}

function createSession(session) {
  const summary = make("summary", {}, make("span", { class: "name" }), make("span", { class: "soft model" }),
    make("span", { class: "soft said" }), split(), make("span", { class: "soft sums" }));
  const details = make("details", {}, summary);
  const item = make("li", {}, details);
  item.session = session;
  details.addEventListener("toggle", () => details.open && open(item, details));
  return item;
}

/** A bar of three parts; its numbers stand beside it. */
const split = () => make("span", { class: "split", "aria-hidden": "true" }, make("span", { class: "reused" }),
  make("span", { class: "computed" }), make("span", { class: "written" }));

function updateSession(item, session) {
  const before = item.session;
  item.session = session;
  const [name, model, said, bar, sums] = item.firstElementChild.firstElementChild.children;
  say(name, clientName(session.client));
  say(model, modelName(session.model));
  model.title = session.model;
  said.title = session.session;
  say(said, session.words || session.session.replace(/-[0-9a-f]{12}$/, "") || `unnamed ${session.id.slice(0, 6)}`);
  const parts = [session.num_cached_tokens, session.num_prefilled_tokens, session.num_generated_tokens];
  parts.forEach((part, index) => bar.children[index].style.setProperty("flex-grow", part));
  const misses = session.num_misses ? `, ${plural(session.num_misses, "miss", "misses")}` : "";
  say(sums, `${percent(session.num_cached_tokens, done(session))} of ${short(done(session))} reused, `
    + `${plural(session.num_turns, "turn")}${misses}, ${ago(session.idle_seconds)}`);
  if (item.timeline && session.newest !== before.newest) item.timeline.load();
}

/** What was reused and computed: a prompt that nobody waited for is neither. */
const done = (each) => each.num_cached_tokens + each.num_prefilled_tokens;

function open(item, details) {
  if (!item.timeline) {
    item.timeline = new Timeline(() => item.session);
    details.append(item.timeline.element);
  }
  item.timeline.load();
}

const POINT = "Point at a bar to read its numbers; choose it for the rest.";

class Timeline {
  constructor(session) {
    this.session = session;
    this.turns = [];
    this.chosen = null;
    this.asked = 0;
    this.hovered = make("p", { class: "soft" }, POINT);
    this.box = make("div", { class: "chart", role: "img" });
    this.told = make("div", { class: "turn", "aria-live": "polite" });
    this.table = make("tbody");
    const buttons = make("div", { class: "buttons" }, this.step("Earlier turn", -1), this.step("Later turn", 1));
    this.element = make("div", { class: "timeline" }, LEGEND.cloneNode(true), this.box, this.hovered, buttons, this.told, make("details", {},
      make("summary", {}, "The same as a table"), make("table", { class: "plain" }, HEAD.cloneNode(true), this.table)));
    this.plot = new Plot(this.box, () => turnOptions(170, () => this.chosen), (index) => this.hover(index), (index) => this.choose(index));
  }

  step(text, by) {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => this.choose(Math.min(this.turns.length - 1, Math.max(0, (this.chosen ?? 0) + by))));
    return button;
  }

  async load() {
    const chosen = this.turns[this.chosen]?.request_id;
    const asked = ++this.asked;
    try {
      const { turns } = await askJson(`dashboard/sessions/${this.session().id}`);
      if (asked !== this.asked) return; // a later answer came first
      this.turns = turns;
    } catch (error) {
      say(this.told, `Its turns cannot be shown: ${error.message}`);
      return;
    }
    const last = this.turns.length - 1;
    const dearest = this.turns.reduce((best, turn, index) => (turn.num_lost_tokens > this.turns[best].num_lost_tokens ? index : best), last);
    const index = this.turns.findIndex((turn) => turn.request_id === chosen);
    this.show(index < 0 ? dearest : index);
  }

  show(index) {
    const turns = this.turns;
    const column = (number) => turns.map(number);
    this.chosen = index;
    this.box.setAttribute("aria-label", `${plural(turns.length, "turn")}: tokens reused, computed and written in each; the table below has them.`);
    this.plot.draw([
      column((turn) => turn.turn),
      column((turn) => done(turn) + turn.num_generated_tokens),
      column(done),
      column((turn) => turn.num_cached_tokens),
    ]);
    this.choose(index);
    keep(this.table, turns, (turn) => turn.request_id,
      () => make("tr", {}, make("th", { scope: "row" }), ...Array.from({ length: 5 }, () => make("td"))),
      (row, turn) => [`${turn.turn}, ${clock(turn.ended_at).slice(0, 5)}`, count(turn.num_cached_tokens), count(turn.num_prefilled_tokens),
        count(turn.num_generated_tokens), turn.num_lost_tokens ? count(turn.num_lost_tokens) : "-", turn.cause || "-"]
        .forEach((text, place) => say(row.children[place], text)));
  }

  /** What the bar below the pointer says; a click has the rest. */
  hover(index) {
    const turn = this.turns[index];
    say(this.hovered, turn ? `Turn ${turn.turn}, ${clock(turn.ended_at)}: ${count(turn.num_cached_tokens)} tokens reused, ${count(turn.num_prefilled_tokens)} computed, `
      + `${count(turn.num_generated_tokens)} written${turn.cause ? `; ${turn.cause}` : ""}` : POINT);
  }

  choose(index) {
    if (index === null || index === undefined || !this.turns[index]) return;
    this.chosen = index;
    this.plot.redraw();
    this.told.replaceChildren(...describe(this.turns[index]));
  }
}

const key = (name, text) => make("span", {}, make("span", { class: `key ${name}` }), ` ${text} `);
const LEGEND = make("p", { class: "legend" }, key("reused", "reused"), key("computed", "computed"), key("written", "written"));
const HEAD = make("thead", {}, make("tr", {}, ...["Turn", "Reused", "Computed", "Written", "Lost", "Cause"].map((name) => make("th", { scope: "col" }, name))));

/** A turn in words: its numbers, why no more was reused, what would mend it. */
function describe(turn) {
  const speed = [turn.first_token_seconds !== null ? `first token ${seconds(turn.first_token_seconds)}` : "",
    turn.decode_rate !== null ? rate(turn.decode_rate) : "", turn.seconds_saved ? `about ${seconds(turn.seconds_saved)} saved` : ""].filter(Boolean);
  const left = turn.parent === null ? "" : ` Branch ${turn.branch}, which left branch ${turn.parent} after message ${turn.fork_message}.`;
  const parts = [make("p", {}, make("strong", {}, `Turn ${turn.turn}`), ` at ${clock(turn.ended_at)}: ${count(turn.num_cached_tokens)} of `
    + `${count(turn.num_prompt_tokens)} tokens reused, ${count(turn.num_generated_tokens)} written${speed.length ? `; ${speed.join(", ")}` : ""}.${left}`)];
  if (turn.summary) parts.push(make("p", {}, make("span", { class: turn.is_miss ? "cause" : "name" }, turn.cause), ` ${turn.summary}`));
  if (turn.is_miss && turn.remedy) parts.push(make("p", {}, make("strong", {}, "What would mend it: "), turn.remedy));
  parts.push(make("p", { class: "soft" }, "Request ", make("code", { class: "id" }, turn.request_id), " ", copyButton(turn.request_id)));
  return parts;
}
