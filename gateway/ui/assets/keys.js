// The form for an API key, which every page has, and what each does first.

import { getJson, Refused, setKey } from "./api.js";

const find = (id) => document.getElementById(id);

/** Runs `open`, again with each key that is given. Returns what to do with an error: ask for a key, or `say` it. */
export function withKey(open, say) {
  const failed = (error) => {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      find("keys").hidden = false;
      find("key").focus();
    }
    say(error.message, "bad");
  };
  const begin = async () => {
    try {
      find("version").textContent = (await getJson("/v1")).version;
      await open();
      find("keys").hidden = true;
    } catch (error) {
      failed(error);
    }
  };
  find("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key").value);
    find("key").value = "";
    begin();
  });
  begin();
  return failed;
}
