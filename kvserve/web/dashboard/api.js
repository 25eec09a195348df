// Asks the server, with the API key where one is wanted. The key stays in this tab.

const KEY = "kvserve-api-key";

export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const dropKey = () => sessionStorage.removeItem(KEY);

/** The answer, whatever its status. */
export function ask(path, { method = "GET", body = null } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  return fetch(path, { method, headers, cache: "no-store", body: body ? JSON.stringify(body) : null });
}

/** The body of a good answer. Throws what the server says of a bad one. */
export async function askJson(path, options) {
  const response = await ask(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? `the server answers ${response.status}`);
  return body;
}
