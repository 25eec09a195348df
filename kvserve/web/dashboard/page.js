// The dashboard: follows /dashboard/events and shows each of its events. What is shown stands in one event; nothing is
// added up here but minutes of the last hour. The API key, where one is wanted, stays in this tab.

import { ago, bytes, chart, count, keep, make, pairs, percent, plural, say, seconds, short } from "./draw.js";

const KEY = "kvserve-api-key";
const NUM_MINUTES = 60;
const at = (id) => document.getElementById(id);

// --- following ---------------------------------------------------------------------------------------------------------

async function follow() {
  for (;;) {
    try {
      const key = sessionStorage.getItem(KEY);
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      const response = await fetch("/dashboard/events", { headers, cache: "no-store" });
      if (response.status === 401) return askForKey();
      if (!response.ok) throw new Error(`the server answers ${response.status}`);
      say(at("link"), "\u25CF live");
      await read(response.body);
      say(at("link"), "\u25CB the server has ended the stream, trying again");
    } catch (error) {
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
      if (event.startsWith("data: {")) show(JSON.parse(event.slice(6)));
    }
  }
}

function askForKey() {
  sessionStorage.removeItem(KEY);
  say(at("link"), "\u25CB the API key is missing or wrong");
  at("key-form").hidden = false;
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  follow();
});

// --- showing -----------------------------------------------------------------------------------------------------------

let newest = null;

function show(state) {
  if (state.error) return;
  newest = state;
  say(at("model"), `${state.health.model} (${state.health.status})`);
  const minutes = lastMinutes(state);
  showFigures(state, minutes);
  showHistory(minutes);
  showRunning(state.running);
  showMisses(state);
  showSessions(state.sessions);
  showMemory(state.cache ?? {}, state.health);
  showCounters(state);
  const text = state.shows_text ? "Text around differences is shown (DASHBOARD_SHOW_TEXT)." : "No prompt text is shown.";
  say(at("foot"), `kvserve ${state.health.version}, up ${ago(state.health.uptime_seconds).replace(" ago", "")}. ${text}`);
}

/** Sums per minute, the oldest first, also of minutes in which nothing ended. */
function lastMinutes(state) {
  const now = Math.floor(state.time / 60);
  const minutes = Array.from({ length: NUM_MINUTES }, (_, index) => (
    { minute: now - NUM_MINUTES + 1 + index, requests: 0, prompt: 0, cached: 0, generated: 0 }));
  for (const [time, requests, prompt, cached, generated] of state.history) {
    const minute = minutes[Math.floor(time / 60) - now + NUM_MINUTES - 1];
    if (!minute) continue;
    minute.requests += requests;
    minute.prompt += prompt;
    minute.cached += cached;
    minute.generated += generated;
  }
  return minutes;
}

function sums(minutes) {
  const sum = (name) => minutes.reduce((total, minute) => total + minute[name], 0);
  return { requests: sum("requests"), prompt: sum("prompt"), cached: sum("cached"), generated: sum("generated") };
}

function showFigures(state, minutes) {
  const hour = sums(minutes);
  const first = state.first_token_seconds;
  const { health } = state;
  const figures = [
    ["Prompt reused, last hour", percent(hour.cached, hour.prompt)],
    ["Requests, last hour", count(hour.requests)],
    ["Tokens reused", short(hour.cached)],
    ["Tokens computed", short(hour.prompt - hour.cached)],
    ["Tokens written", short(hour.generated)],
    ["First token, median", first ? seconds(first.median) : "-"],
    ["First token, slowest 5\u00A0%", first ? seconds(first.p95) : "-"],
    ["Running and waiting", `${health.num_running} and ${health.num_waiting}`],
  ];
  const warmed = state.cache?.num_warmed_tokens;
  if (warmed !== undefined) figures.push(["Computed ahead of time", short(warmed)]);
  const won = state.cache?.warming?.num_used_tokens;
  if (won !== undefined) figures.push(["Of these used by requests", short(won)]);
  const drafts = state.cache?.speculation;
  if (drafts?.num_drafted_tokens) {
    figures.push(["Tokens a step, where drafted", drafts.tokens_per_step.toFixed(1)],
      ["Drafted tokens that were right", percent(drafts.num_accepted_tokens, drafts.num_drafted_tokens)],
      [drafts.seconds_saved < 0 ? "Time lost by drafts" : "Time saved by drafts", seconds(Math.abs(drafts.seconds_saved))]);
  }
  pairs(at("figures"), figures);
}

function showHistory(minutes) {
  const hour = sums(minutes);
  const sentence = `Last hour: ${count(hour.cached)} of ${count(hour.prompt)} prompt tokens reused, ${percent(hour.cached, hour.prompt)}.`;
  at("chart").replaceChildren(chart(minutes, sentence, Math.max(280, at("chart").clientWidth)));
  const busy = minutes.filter((minute) => minute.requests).reverse();
  keep(at("history"), busy, (minute) => minute.minute,
    () => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td"), make("td")),
    (row, minute) => {
      const time = new Date(minute.minute * 60_000).toTimeString().slice(0, 5);
      const cells = [time, count(minute.requests), count(minute.cached), count(minute.prompt - minute.cached),
        percent(minute.cached, minute.prompt)];
      cells.forEach((text, index) => say(row.children[index], text));
    });
}

// The chart's letters keep their size: it is drawn anew for another width, not stretched.
addEventListener("resize", () => newest && showHistory(lastMinutes(newest)));

const STAGES = { waiting: "waits", prefill: "reads the prompt", decode: "writes" };

const stage = (request) => (request.stage === "waiting for model" ? `waits for ${request.model}` : STAGES[request.stage]);

function showRunning(running) {
  say(at("num-running"), running.length ? `(${running.length})` : "");
  at("no-running").hidden = running.length > 0;
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

function showMisses(state) {
  const { misses } = state;
  say(at("num-misses"), misses.length ? `(last ${misses.length})` : "");
  at("no-misses").hidden = misses.length > 0;
  keep(at("misses"), misses, (miss) => miss.request_id, createMiss, () => {});
}

function createMiss(miss) {
  const summary = make("summary", {}, make("span", { class: "cause" }, miss.cause), ` ${place(miss.first_difference)} `,
    make("code", {}, miss.request_id.slice(0, 12)));
  const details = make("details", {}, summary, make("p", {}, miss.summary), wholeId(miss.request_id));
  if (miss.remedy) details.append(make("p", {}, make("strong", {}, "What would mend it: "), miss.remedy));
  const facts = [`${count(miss.cached_tokens)} of ${count(miss.num_prompt_tokens)} tokens reused from ${source(miss)}.`];
  if (miss.rules.length) facts.push(`Rules: ${miss.rules.map((rule) => `${rule} (${miss.policies[rule] ?? "fixed"})`).join(", ")}.`);
  details.append(make("p", { class: "soft" }, facts.join(" ")));
  if (miss.first_difference?.before !== undefined) {
    details.append(make("pre", {}, `before: ${miss.first_difference.before}\nnow:    ${miss.first_difference.after}`));
  }
  return make("li", {}, details);
}

/** The whole id, for whoever looks it up: one click selects it, or copies it where the browser allows that. */
function wholeId(id) {
  const line = make("p", { class: "soft" }, "Request ", make("code", { class: "id" }, id));
  if (navigator.clipboard) {
    const button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", () => navigator.clipboard.writeText(id).then(() => say(button, "Copied"), () => say(button, "Not allowed")));
    line.append(" ", button);
  }
  return line;
}

function place(difference) {
  if (!difference) return "";
  if (difference.tool) return `at tool ${difference.tool}, character ${count(difference.char)}`;
  if (difference.role === "prompt") return `at character ${count(difference.char)}`;
  const message = difference.message_index === null ? "a message" : `message ${difference.message_index}`;
  return `at ${message} (${difference.role}), character ${count(difference.char)}`;
}

const source = (miss) => (miss.tier === "nothing" ? "nowhere" : `${shorter(miss.source)} (${miss.tier})`);

/** A source with the beginning of its request's id, as the terminal shows it. */
const shorter = (text) => text.replace(/^request (.{12}).*/, "request $1");

// --- sessions ----------------------------------------------------------------------------------------------------------

function showSessions(sessions) {
  say(at("num-sessions"), sessions.length ? `(${sessions.length})` : "");
  at("no-sessions").hidden = sessions.length > 0;
  keep(at("sessions"), sessions, (session) => session.name, createSession, updateSession);
}

function createSession() {
  const list = make("ul");
  const details = make("details", { open: "" }, make("summary", {}, make("span", { class: "name" }), " ", make("span", { class: "soft" })), list);
  return make("li", {}, details);
}

function updateSession(item, session) {
  const [summary, list] = item.firstElementChild.children;
  say(summary.children[0], session.name);
  say(summary.children[1], `${plural(session.branches.length, "branch", "branches")}, ${ago(session.idle_seconds)}`);
  showBranches(list, session.branches, null, new Set(session.branches.map((branch) => branch.id)));
}

/** The branches that left `parent`, each with its own below it; one whose parent is forgotten stands at the top. */
function showBranches(list, branches, parent, known) {
  const mine = branches.filter((branch) => (known.has(branch.parent) ? branch.parent : null) === parent);
  keep(list, mine, (branch) => branch.id,
    () => make("li", {}, make("div", {}, make("span"), make("div", { class: "soft" })), make("ul")),
    (item, branch) => {
      const [label, below] = item.children;
      label.children[0].className = branch.parent === null ? "" : "fork";
      const left = branch.parent === null ? "" : `, left branch ${branch.parent} after message ${branch.fork_message} (token ${count(branch.fork_token)})`;
      say(label.children[0], `branch ${branch.id}: ${plural(branch.num_turns, "turn")}, ${plural(branch.num_messages, "message")}, ${count(branch.num_tokens)} tokens${left}`);
      say(label.children[1], reused(branch));
      showBranches(below, branches, branch.id, known);
    });
}

function reused(branch) {
  const { last } = branch;
  if (!last) return ago(branch.idle_seconds);
  const share = `${percent(last.num_cached_tokens, last.num_prompt_tokens)} reused`;
  const from = last.tier === "nothing" ? "" : ` from ${shorter(last.source)} (${last.tier})`;
  return `last turn ${share}${from}, ${last.cause}, ${ago(branch.idle_seconds)}`;
}

// --- memory and counters -----------------------------------------------------------------------------------------------

function showMemory(cache, health) {
  const meters = [["RAM", cache.ram_bytes, cache.max_ram_bytes, `, running requests ${bytes(cache.live_bytes ?? 0)}`],
    ["Disk", cache.disk?.total_bytes, cache.disk?.max_bytes, `, this model's ${bytes(cache.disk_bytes ?? 0)}`]].filter(([, value]) => value !== undefined && value !== null);
  meters.push(["All that MLX uses", health.active_memory_bytes, null, ""]);
  keep(at("meters"), meters, ([name]) => name,
    ([name]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("meter", { "aria-label": name }), make("div", { class: "soft" }))),
    (child, [, value, limit, more]) => {
      const [meter, text] = child.lastElementChild.children;
      meter.hidden = !limit;
      meter.max = limit || 1;
      meter.value = limit ? value : 0;
      say(text, `${bytes(value)}${limit ? ` of ${bytes(limit)}` : ""}${more}`);
    });
}

const WORDS = {
  num_segments: "Stored runs of KV", num_checkpoints: "Stored states", num_entries: "Stored ends",
  num_evicted_tokens: "Tokens that have left", num_healing_entries: "Answers that can be healed",
};

function showCounters(state) {
  const cache = state.cache ?? {};
  const entries = Object.entries(cache.counters ?? {});
  if (cache.disk) entries.push(["Tokens back from disk", cache.disk.num_restored_tokens], ["Disk errors", cache.disk.num_errors]);
  if (cache.warming) {
    entries.push(["Tokens computed ahead in vain", cache.warming.num_wasted_tokens],
      ["Seconds spent ahead of time", cache.warming.seconds]);
  }
  for (const [name, word] of Object.entries(WORDS)) {
    if (cache[name] !== undefined) entries.push([word, cache[name]]);
  }
  for (const [cause, number] of Object.entries(state.causes)) entries.push([`Cause: ${cause}`, number]);
  pairs(at("counters"), entries.map(([name, number]) => [name, count(number)]));
}

follow();
