// Asks for the JSON again and again while a run lasts.

const POLL_MS = 2000, IDLE_MS = 10000, HIDDEN_MS = 30000, SLOWEST_MS = 30000, TIMEOUT_MS = 15000;

/**
 * Fetches the page's JSON again and again and shows each answer in `page`, which takes the place of
 * the server's own table at the first one. `show(data)` says how soon the next is wanted: in
 * milliseconds, or null for never. A request that fails is tried again, ever later; what is on the
 * page stays.
 */
function follow(root, page, show) {
  const connection = html("p", { class: "training-quiet", role: "status" });
  root.prepend(connection);
  const live = root.dataset.live !== "false";
  let timer = null, failures = 0, wanted = POLL_MS, over = false;
  const later = () => {
    clearTimeout(timer);
    if (over) return;
    const wait = failures ? Math.min(SLOWEST_MS, wanted * 2 ** failures) : wanted;
    timer = setTimeout(ask, document.hidden ? Math.max(wait, HIDDEN_MS) : wait);
  };
  const ask = async () => {
    let data;
    try {
      const answer = await fetch(root.dataset.json, {
        cache: "no-store", headers: { Accept: "application/json" },
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      data = await answer.json();
    } catch (error) {
      failures += 1;
      setText(connection, `Lost contact with the driver (${error.message}). ` +
        "Showing the last data received; retrying \u2026");
      later();
      return;
    }
    failures = 0;
    setText(connection, "");
    if (!page.isConnected) root.replaceChildren(connection, page);
    const next = show(data);
    over = next === null || !live;
    wanted = next ?? POLL_MS;
    later();
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !over) {
      clearTimeout(timer);
      ask();
    }
  });
  ask();
}
