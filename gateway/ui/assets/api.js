// What the pages ask of the gateway, with the key that this tab has been given.

const KEY = "api-key";

export const setKey = (key) => sessionStorage.setItem(KEY, key);

/** An answer that is no success: `status`, and the gateway's own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Something between the page and the gateway has answered in its own way.
  }
  throw new Refused(response.status, message || `status ${response.status}`);
}

export const getJson = async (path) => (await ask(path)).json();

/** The events of a stream, each as an object. */
export async function* streamed(path, body) {
  const reader = (await ask(path, { ...body, stream: true })).body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Refused(500, found.error.message);
      yield found;
    }
    if (done) throw new Refused(0, "the answer broke off");
  }
}
