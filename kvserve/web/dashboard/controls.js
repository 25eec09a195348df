// What the page can do: load a model, compute a prompt ahead, clear the cache, copy a client's configuration. It uses the
// endpoints that every client has, with the same key.

import { askJson } from "./api.js";
import { at, copyButton, count, keep, make, modelName, say, seconds } from "./draw.js";

const LOOK_AGAIN_MS = 30_000;
let loaded = null;
let models = [];
let asked = 0;
let hasClients = false;

/** Look for models and snippets as soon as there are any, and for models again now and then. */
export async function showModels(health) {
  const isNew = loaded !== health.model;
  loaded = health.model;
  if (health.status === "loading" || (!isNew && Date.now() - asked < LOOK_AGAIN_MS)) return listModels();
  asked = Date.now();
  try {
    models = (await askJson("v1/models")).data;
    if (!hasClients) showClients(await askJson("dashboard/clients"));
  } catch {
    asked = Date.now() - LOOK_AGAIN_MS + 2000; // a server that has just begun knows none yet
  }
  listModels();
}

function listModels() {
  at("few-models").hidden = models.length !== 1;
  keep(at("models"), models, (model) => model.id, createModel, (item, model) => {
    const isLoaded = model.id === loaded || model.root === loaded;
    const [, soft, button] = item.children;
    const context = model.max_model_len ? `, context ${count(model.max_model_len)} tokens` : "";
    say(soft, `${isLoaded ? "loaded" : "on disk"}${context}${model.root ? `, another name of ${modelName(model.root)}` : ""}`);
    button.hidden = isLoaded;
  });
}

function createModel(model) {
  const button = make("button", { type: "button", "aria-label": `Load ${modelName(model.id)}` }, "Load");
  button.addEventListener("click", () => during(button, `Loading ${modelName(model.id)}; requests that run are finished first.`, async () => {
    await askJson("v1/models/load", { method: "POST", body: { model: model.id } });
    return `${modelName(model.id)} is loaded.`;
  }));
  return make("li", { class: "model" }, make("span", { class: "name", title: model.id }, modelName(model.id)), make("span", { class: "soft" }), button);
}

/** Do something with its button out of use, and tell how it went. */
async function during(button, text, act) {
  button.disabled = true;
  say(at("told"), text);
  try {
    say(at("told"), await act());
  } catch (error) {
    say(at("told"), `That did not work: ${error.message}`);
  }
  button.disabled = false;
}

at("prewarm").addEventListener("submit", (event) => {
  event.preventDefault();
  during(event.submitter, "Computing; requests come first.", async () => {
    const messages = [{ role: "system", content: at("ahead").value }];
    const done = await askJson("v1/cache/prewarm", { method: "POST", body: { model: loaded, messages } });
    return `${count(done.tokens)} tokens are ready: ${count(done.computed)} computed in ${seconds(done.seconds)}, ${count(done.cached)} were there.`;
  });
});

at("clear").addEventListener("click", () => at("sure").showModal());
at("keep").addEventListener("click", () => at("sure").close());
at("really").addEventListener("click", () => {
  at("sure").close();
  during(at("clear"), "Clearing.", async () => {
    await askJson("v1/cache", { method: "DELETE" });
    return "The cache is empty.";
  });
});

/** With the address by which this page was found, which port 4000 does not tell the server. */
function showClients({ url, clients }) {
  hasClients = true;
  const here = (text) => text.replaceAll(url, location.origin);
  const told = clients.map((client) => ({ ...client, launch: here(client.launch), text: here(client.text) }));
  keep(at("clients"), told, (client) => client.name, createClient, () => {});
}

function createClient(client) {
  const line = (label, text) => make("div", { class: "snippet" }, make("p", { class: "soft" }, label), make("pre", {}, text), copyButton(text, "Copy"));
  return make("li", {}, make("details", {}, make("summary", {}, make("span", { class: "name" }, client.name)),
    line("Start it against this server; your own files of it are not changed", client.launch),
    line("Or write by hand", client.text), line("It is installed with", client.install)));
}
