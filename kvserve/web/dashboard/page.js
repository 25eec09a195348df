// The dashboard: follows /dashboard/events and shows each of its events. What is shown stands in one event; nothing is
// added up here but the steps of the time that is looked at.

import { ask, dropKey, keepKey } from "./api.js";
import { Plot, activityOptions } from "./charts.js";
import { showModels } from "./controls.js";
import { ago, at, bytes, clientName, clock, copyButton, count, dayTime, keep, make, modelName, pairs, percent, plural, rate, say, seconds, short } from "./draw.js";
import { showSessions } from "./sessions.js";

// --- following ---------------------------------------------------------------------------------------------------------

async function follow() {
  for (;;) {
    try {
      const response = await ask("dashboard/events");
      if (response.status === 401) return askForKey();
      if (!response.ok) throw new Error(`the server answers ${response.status}`);
      isLive = true;
      sayLink();
      await read(response.body);
      isLive = false;
      say(at("link"), "\u25CB the server has ended the stream, trying again");
    } catch (error) {
      isLive = false;
      say(at("link"), `\u25CB not connected (${error.message}), trying again`);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) hear(JSON.parse(event.slice(6)));
    }
  }
}

function askForKey() {
  dropKey();
  say(at("link"), "\u25CB the API key is missing or wrong");
  at("key-form").hidden = false;
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  follow();
});

let newest = null;
let isLive = false;
let isPaused = false;

const sayLink = () => say(at("link"), isPaused ? "\u275A\u275A paused" : "\u25CF live");

at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  if (isLive) sayLink();
  if (newest && !isPaused) show(newest);
});

function hear(state) {
  if (state.error) return;
  newest = state;
  if (!isPaused) show(state);
}

// --- showing -----------------------------------------------------------------------------------------------------------

let shown = null;

function show(state) {
  shown = state;
  const { health } = state;
  say(at("model"), `${modelName(health.model)} (${health.status})`);
  at("model").title = health.model;
  showNumbers(state);
  showHistory(state);
  showRunning(state.running);
  showMisses(state);
  showSessions(state.conversations);
  const covered = state.kept.since === null ? "" : `of the last ${plural(state.kept.num_requests, "request")}, since ${dayTime(state.kept.since)}`;
  say(at("sessions-of"), covered);
  say(at("misses-of"), covered);
  showLast(state.last);
  showMemory(state);
  showShared(state.cache?.remote);
  showModels(health);
  showCounters(state);
  const text = state.shows_text ? "First words of sessions are shown (DASHBOARD_SHOW_TEXT)." : "No words of prompts are shown.";
  say(at("foot"), `kvserve ${health.version}, up ${ago(health.uptime_seconds).replace(" ago", "")}. ${text}`);
}

// --- the three numbers -------------------------------------------------------------------------------------------------

const RANGES = {
  hour: { name: "last hour", seconds: 3_600, step: 60, each: "minute" },
  day: { name: "last 24 hours", seconds: 86_400, step: 600, each: "10 minutes" },
  week: { name: "last 7 days", seconds: 7 * 86_400, step: 3_600, each: "hour" },
};
let range = "day";

at("ranges").addEventListener("change", (event) => {
  range = event.target.value;
  if (!shown) return;
  showNumbers(shown);
  showHistory(shown);
});

function showNumbers(state) {
  const steps = state.activity[range] ?? [];
  const sum = (place) => steps.reduce((total, step) => total + step[place], 0);
  const [requests, cached, saved] = [sum(1), sum(3), sum(5)];
  const prompt = cached + sum(6); // a prompt that nobody waited for was neither reused nor computed
  say(at("reused"), percent(cached, prompt));
  say(at("reused-of"), prompt ? `${short(cached)} of ${short(prompt)} tokens in ${plural(requests, "request")}, ${RANGES[range].name}` : `no request in the ${RANGES[range].name}`);
  say(at("saved"), prompt ? `about ${seconds(saved)}` : "-");
  say(at("saved-of"), "of prefill, at the speed that was measured here");
  const { num_running: running, num_waiting: waiting } = state.health;
  say(at("now"), waiting ? `${running} and ${waiting} waiting` : String(running));
  const { prefill, decode } = state.speed;
  const newest = (name) => state.last.find((request) => request[`${name}_rate`] !== null)?.[`${name}_rate`];
  const before = ["prefill", "decode"].filter((name) => newest(name) !== undefined).map((name) => `${name} ${rate(newest(name))}`).join(", ");
  say(at("now-of"), running || prefill || decode ? `prefill ${rate(prefill)}, decode ${rate(decode)}` : before ? `measured last: ${before}` : "prefill and decode: nothing measured yet");
}

// --- the chart ---------------------------------------------------------------------------------------------------------

let steps = [];
let plot = null;

/** All steps of the range, the oldest first, also those in which nothing ended. */
function stepsOf(state) {
  const { step, seconds: length } = RANGES[range];
  const last = Math.floor(state.time / step) * step;
  const known = new Map(state.activity[range].map((each) => [each[0] * 60, each]));
  return Array.from({ length: length / step }, (_, index) => {
    const time = last - length + step + index * step;
    const [, requests, , cached, generated, saved, computed] = known.get(time) ?? [0, 0, 0, 0, 0, 0, 0];
    return { time, requests, prompt: cached + computed, cached, generated, saved };
  });
}

const timeText = (time) => {
  const date = new Date(time * 1000);
  return range === "week" ? date.toLocaleDateString("en", { weekday: "short", day: "numeric" }) : date.toTimeString().slice(0, 5);
};

function showHistory(state) {
  steps = stepsOf(state);
  const busy = steps.filter((step) => step.prompt);
  const cached = busy.reduce((total, step) => total + step.cached, 0);
  const prompt = busy.reduce((total, step) => total + step.prompt, 0);
  at("chart").setAttribute("aria-label", `${RANGES[range].name}: ${count(cached)} of ${count(prompt)} prompt tokens reused, ${percent(cached, prompt)}; the table below has each ${RANGES[range].each}.`);
  plot ??= new Plot(at("chart"), () => activityOptions(220, () => `tokens per ${RANGES[range].each}`, () => steps[0].time,
    () => steps.at(-1).time + RANGES[range].step, timeText), sayStep);
  if (plot.range !== range) plot.look = "";
  plot.range = range;
  plot.draw([
    steps.map((step) => step.time),
    steps.map((step) => step.prompt || null),
    steps.map((step) => (step.prompt ? step.cached : null)),
    steps.map((step) => (step.prompt ? (100 * step.cached) / step.prompt : null)),
  ]);
  keep(at("history"), busy.reverse(), (step) => step.time,
    () => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td"), make("td")),
    (row, step) => {
      const day = range === "hour" ? "" : `${new Date(step.time * 1000).toLocaleDateString("en", { weekday: "short" })} `;
      const cells = [day + clock(step.time).slice(0, 5), count(step.requests), count(step.cached), count(step.prompt - step.cached), percent(step.cached, step.prompt)];
      cells.forEach((text, index) => say(row.children[index], text));
    });
}

function sayStep(index) {
  const step = index === null || index === undefined ? null : steps[index];
  say(at("hover"), step ? `${timeText(step.time)}, ${clock(step.time).slice(0, 5)} to ${clock(step.time + RANGES[range].step).slice(0, 5)}: ${plural(step.requests, "request")}, `
    .replace(/^(\d\d:\d\d), /, "") + `${count(step.cached)} tokens reused, ${count(step.prompt - step.cached)} computed (${percent(step.cached, step.prompt)} reused), about ${seconds(step.saved)} saved`
    : "Point at a bar to read its numbers.");
}

// --- what runs, and what was lost --------------------------------------------------------------------------------------

const STAGES = { waiting: "waits", prefill: "reads the prompt", decode: "writes" };

const stage = (request) => (request.stage === "waiting for model" ? `waits for ${modelName(request.model)}` : STAGES[request.stage]);

function showRunning(running) {
  say(at("num-running"), running.length ? `(${running.length})` : "");
  at("running-box").hidden = running.length === 0;
  keep(at("running"), running, (request) => request.request_id,
    () => make("li", {}, make("div", {}, make("span", { class: "name" }), " ", make("span")), make("progress"), make("div", { class: "soft" })),
    (row, request) => {
      const [head, bar, foot] = row.children;
      say(head.children[0], request.request_id.slice(0, 12));
      head.children[0].title = request.request_id;
      say(head.children[1], `${request.protocol}, ${stage(request)}, ${seconds(request.seconds)}${request.session ? `, session ${request.session}` : ""}`);
      bar.max = Math.max(1, request.num_prompt_tokens);
      bar.value = request.num_done_tokens;
      bar.setAttribute("aria-label", `prompt of ${request.request_id.slice(0, 12)}`);
      say(foot, `prompt ${count(request.num_done_tokens)} of ${count(request.num_prompt_tokens)} tokens, `
        + `${count(request.num_cached_tokens)} of them reused; ${count(request.num_generated_tokens)} written`);
    });
}

const ROLES = { system: "the system prompt", developer: "the developer's message", user: "a user's message", assistant: "an answer",
  tool: "a tool's result", tools: "the tools", prompt: "the prompt", template: "the template" };

function showMisses({ losses, misses }) {
  const all = [...losses.groups, ...losses.rest];
  const time = losses.seconds ? `, about ${seconds(losses.seconds)}` : "";
  say(at("num-misses"), all.length ? `${short(losses.num_tokens)} tokens that could have been kept${time},` : "");
  at("no-misses").hidden = all.length > 0;
  const name = (group) => `${group.cause}|${group.role}|${group.looks_like}`;
  const places = new Map(misses.map((miss) => [miss.request_id, miss.first_difference]));
  const list = (id, groups) => keep(at(id), groups, name, createMiss, (item, group) => updateMiss(item, group, losses.num_tokens, places.get(group.newest)));
  list("misses", losses.groups);
  at("rest-box").hidden = losses.rest.length === 0;
  const rest = losses.rest.reduce((total, group) => total + group.num_tokens, 0);
  say(at("rest-head"), `${plural(losses.rest.length, "other cause")}, each below 5 %: ${short(rest)} tokens`);
  list("rest", losses.rest);
}

const createMiss = () => make("li", { class: "miss" }, make("p", { class: "cost" }, make("strong"), make("span", { class: "soft" })),
  make("p", {}, make("span", { class: "cause" }), make("span")), make("p", {}, make("strong", {}, "Mend it: "), make("span")),
  make("details", {}, make("summary", { class: "soft" }), make("p"), make("pre"), make("p", { class: "soft" }, "Newest request ", make("code", { class: "id" }), " ")));

function updateMiss(item, group, all, place) {
  const [cost, head, mend, details] = item.children;
  const where = ROLES[group.role] && group.cause !== "tools changed" ? ` in ${ROLES[group.role]}` : "";
  say(head.children[0], group.cause);
  say(head.children[1], group.looks_like === "tools in another order" ? ", in another order" : where + (group.looks_like ? `: ${group.looks_like}` : ""));
  say(cost.children[0], `${short(group.num_tokens)} tokens${group.seconds ? `, about ${seconds(group.seconds)}` : ""}`);
  say(cost.children[1], `${percent(group.num_tokens, all)} of all that was lost`);
  mend.hidden = !group.remedy;
  say(mend.children[1], group.remedy);
  const [summary, told, text, newest] = details.children;
  text.hidden = place?.before === undefined; // the server sends it only where that is allowed
  say(text, text.hidden ? "" : `before: ${place.before}\nnow:    ${place.after}`);
  say(summary, `${plural(group.num_requests, "request")} of ${group.clients.map(clientName).join(", ")}`);
  say(told, group.summary);
  if (newest.children[0].textContent === group.newest) return;
  say(newest.children[0], group.newest);
  newest.children[1]?.remove();
  newest.append(copyButton(group.newest));
}

// --- the last requests -------------------------------------------------------------------------------------------------

const done = (request) => request.num_cached_tokens + request.num_prefilled_tokens;
const COLUMNS = [
  ["Time", (request) => request.ended_at, (request) => clock(request.ended_at)],
  ["Client", (request) => clientName(request.client).toLowerCase(), (request) => clientName(request.client)],
  ["Model", (request) => modelName(request.model), (request) => modelName(request.model)],
  ["In", (request) => request.num_prompt_tokens, (request) => count(request.num_prompt_tokens)],
  ["Reused", (request) => request.num_cached_tokens / (done(request) || 1), (request) => percent(request.num_cached_tokens, done(request))],
  ["Out", (request) => request.num_generated_tokens, (request) => count(request.num_generated_tokens)],
  ["First token", (request) => request.first_token_seconds ?? -1, (request) => (request.first_token_seconds === null ? "-" : seconds(request.first_token_seconds))],
  ["Tok/s", (request) => request.decode_rate ?? -1, (request) => (request.decode_rate === null ? "-" : request.decode_rate.toFixed(1))],
  ["Cause", (request) => request.cause, (request) => request.cause || "-"],
];
const WORDS = new Set(["Client", "Model", "Cause"]); // sorted from A to Z first, numbers from the largest
let sorting = { column: 0, isDown: true };

COLUMNS.forEach(([name], column) => {
  const button = make("button", { type: "button" }, name);
  button.addEventListener("click", () => {
    sorting = { column, isDown: sorting.column === column ? !sorting.isDown : !WORDS.has(name) };
    if (shown) showLast(shown.last);
  });
  at("columns").append(make("th", { scope: "col", class: WORDS.has(name) || column === 0 ? "words" : "number" }, button));
});

function showLast(requests) {
  const { column, isDown } = sorting;
  Array.from(at("columns").children, (head, index) => (index === column ? head.setAttribute("aria-sort", isDown ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
  const value = COLUMNS[column][1];
  const order = (one, other) => (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0);
  const sorted = requests.toSorted((one, other) => (isDown ? -order(one, other) : order(one, other)));
  say(at("num-last"), requests.length ? `(${requests.length})` : "");
  keep(at("last"), sorted, (request) => request.request_id,
    (request) => make("tr", { title: `${request.request_id}, ended: ${request.end}` }, ...COLUMNS.map(([name], column) => make("td", { class: WORDS.has(name) || column === 0 ? "words" : "number" }))),
    (row, request) => COLUMNS.forEach(([, , text], index) => say(row.children[index], text(request))));
}

// --- memory and counters -----------------------------------------------------------------------------------------------

function showMemory({ cache, health, machine_bytes: machine }) {
  const meters = [["MLX in use, of this machine's memory", health.active_memory_bytes, machine]];
  if (health.memory) meters.push(["This model with all that it keeps, of its budget", health.memory.total_bytes, health.memory.budget_bytes]);
  if (cache) meters.push(["Kept prompts (KV) in memory", cache.ram_bytes, cache.max_ram_bytes]);
  if (cache?.disk) meters.push(["Kept prompts (KV) on disk, of all models", cache.disk.total_bytes, cache.disk.max_bytes]);
  keep(at("meters"), meters, ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("meter", { "aria-label": name }), make("div", { class: "soft" }))),
    (child, [, value, limit]) => {
      const [meter, text] = child.lastElementChild.children;
      meter.max = limit || 1;
      meter.value = limit ? value : 0;
      say(text, `${bytes(value)} of ${bytes(limit)} (${percent(value, limit)})`);
    });
}

const SHARED = { connecting: "not reached yet", up: "up", full: "up, but full: nothing is sent", down: "down: left alone until it answers",
  lying: "left alone: it gave damaged KV", forgetting: "forgetting somebody: nothing else is asked" };

/** The cache that several servers share; nothing where none is set. */
function showShared(shared) {
  at("shared-box").hidden = !shared;
  if (!shared) return;
  say(at("shared-state"), SHARED[shared.state]);
  at("shared-state").title = shared.place;
  const errors = Object.entries(shared.errors).map(([name, number]) => `${name.replace("_", " ")} ${count(number)}`).join(", ");
  pairs(at("shared"), [["Read from there", bytes(shared.num_read_bytes)], ["Sent there", bytes(shared.num_written_bytes)],
    ["Prompts that found something", `${count(shared.num_hits)} of ${count(shared.num_looks)}`], ["Tokens that came from there", short(shared.num_restored_tokens)],
    ["Left there, as computing takes less time", count(shared.num_declined)], ["Broken off", count(shared.num_given_up)],
    ["Faults", errors || "none"]]);
}

const COUNTERS = {
  num_segments: "Stretches of prompts kept in memory",
  num_checkpoints: "Copies of a model's state kept in memory",
  num_entries: "Prompts that can be gone on from",
  num_evicted_tokens: "Tokens that made room for others",
  num_healing_entries: "Answers that are known word for word",
};
const FAULTS = {
  vlm_retreat: "Prompts that reused less because of an image",
  hybrid_trim_miss: "Prompts for which no copy of the state was there",
  exact_key_rejected_by_model_lcp: "Messages that were the same and read differently",
};
const SOURCES = { conversation: "the conversation", records: "earlier answers", prediction: "the client's prediction", grammar: "the form", "draft model": "the draft model" };

function showCounters(state) {
  const cache = state.cache ?? {};
  const first = state.first_token_seconds;
  const entries = first ? [["First token, median", seconds(first.median)], ["First token, slowest 5\u00A0%", seconds(first.p95)]] : [];
  if (cache.warming) {
    entries.push(["Tokens computed ahead", short(cache.num_warmed_tokens)], ["Of these used by requests", short(cache.warming.num_used_tokens)],
      ["Of these in vain", short(cache.warming.num_wasted_tokens)], ["Time spent ahead", seconds(cache.warming.seconds)]);
  }
  const drafts = cache.speculation;
  if (drafts?.num_drafted_tokens) {
    entries.push(["Tokens a step, where drafted", drafts.tokens_per_step.toFixed(1)],
      ["Drafted tokens that were right", percent(drafts.num_accepted_tokens, drafts.num_drafted_tokens)],
      [drafts.seconds_saved < 0 ? "Time lost by drafts" : "Time saved by drafts", seconds(Math.abs(drafts.seconds_saved))]);
    for (const [source, each] of Object.entries(drafts.by_source)) {
      entries.push([`Drafted from ${SOURCES[source] ?? source}`, `${short(each.num_drafted_tokens)}, right ${short(each.num_accepted_tokens)}`]);
    }
  }
  for (const [name, words] of Object.entries(COUNTERS)) if (cache[name] !== undefined) entries.push([words, count(cache[name])]);
  if (cache.disk) entries.push(["Tokens read back from disk", short(cache.disk.num_restored_tokens)], ["Disk errors", count(cache.disk.num_errors)]);
  for (const [name, words] of Object.entries(FAULTS)) if (cache.counters?.[name] !== undefined) entries.push([words, count(cache.counters[name])]);
  for (const [cause, number] of Object.entries(state.causes)) entries.push([`Requests: ${cause}`, count(number)]);
  pairs(at("counters"), entries);
}

follow();
