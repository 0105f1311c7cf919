(() => {
  const ROW = 4.5; // rem, height of a row of the list, as in edit.css
  const SPARE = 12; // rows that are made above and below the window of the list
  const PIXELS = 128; // smaller pictures are shown pixel by pixel
  const POLL = 2000; // milliseconds between questions about other windows
  const items = new Map(); // dataset and stem -> caption, as the server tells it
  const drafts = new Map(); // dataset and stem -> text that is not saved
  const state = { version: -1, undo: null, trained: false, preview: "" };
  let found = []; // keys of the items that are shown
  let now = null; // key of the present item
  let conflict = null; // caption as another window left it

  const keyOf = ({ dataset, stem }) => `${dataset}\n${stem}`;
  const hasFile = (item) => item.base !== "";
  const textOf = (item) => item.written ?? item.made ?? "";
  const say = (text) => { at("said").textContent = text; };

  // -- the server ---------------------------------------------------------------------------------

  async function ask(name, values) {
    const options = values && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values) };
    const answer = await fetch(name, options).catch(() => null);
    if (!answer) return { ok: false, status: 0, what: "The server has ended. Start it again; texts in this window are not lost." };
    const result = await answer.json().catch(() => ({ what: "refused" }));
    return { ...result, ok: answer.ok, status: answer.status };
  }

  // Takes over what the server tells; a text that is being edited stays.
  function learn(result) {
    for (const caption of result.captions ?? []) items.set(keyOf(caption), caption);
    if (result.version !== undefined) state.version = result.version;
    if (result.undo !== undefined) state.undo = result.undo;
    at("undo").disabled = !state.undo;
    at("undo").title = state.undo ? `Undo: ${state.undo[1]}` : "";
    if (result.work !== undefined) at("work").textContent = result.work || "Planning …";
    if ((result.captions ?? []).length) {
      filter();
      if (result.captions.some((caption) => keyOf(caption) === now)) show(now, false);
    }
  }

  async function poll() {
    if (!document.hidden) {
      const result = await ask(`state?since=${state.version}`);
      if (result.ok) learn(result);
      else at("work").textContent = result.what;
    }
    setTimeout(poll, at("work").textContent.startsWith("Planning") ? POLL / 5 : POLL);
  }

  // -- the list -----------------------------------------------------------------------------------

  const FILTERS = {
    all: ["All", () => true],
    none: ["No caption", (item) => item.written === null && item.made === null],
    made: ["Made", (item) => !hasFile(item) && item.made !== null],
    written: ["Written", hasFile],
    changed: ["Changed since the last training", (item) => item.changed],
    drafts: ["Not saved", (item) => drafts.has(keyOf(item))],
    faulty: ["Faulty", (item) => item.fault],
  };

  function filter() {
    const [words, dataset] = [at("words").value.toLowerCase(), at("dataset").value];
    const test = FILTERS[at("filter").value][1];
    found = [...items].filter(([, item]) => test(item) && (!dataset || item.dataset === dataset)
      && (!words || [item.stem, textOf(item)].some((text) => text.toLowerCase().includes(words)))).map(([key]) => key);
    at("count").textContent = `${found.length} of ${items.size} items`;
    draw();
  }

  const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
  const picture = (item, size) => `picture/${size}?${new URLSearchParams({ dataset: item.dataset, stem: item.stem, time: item.picture })}`;

  function row(key, index) {
    const [item, element, box] = [items.get(key), make("div", "row"), make("div")];
    element.id = `row-${index}`;
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", String(key === now));
    element.style.top = `${index * ROW}rem`;
    const marks = [drafts.has(key) && "not saved", item.fault && "faulty", item.changed && "changed",
      !hasFile(item) && item.made !== null && `by ${item.by}`].filter(Boolean);
    const image = make("img");
    image.alt = "";
    image.loading = "lazy";
    image.decoding = "async";
    if (item.picture !== null) image.src = picture(item, "small");
    const name = make("b", "", item.stem);
    if (marks.length) name.append(" ", make("i", "", marks.join(", ")));
    box.append(name, make("p", "", drafts.get(key) ?? (textOf(item) || (item.awaits ? "not made yet" : "no caption"))));
    element.append(image, box);
    element.addEventListener("click", () => show(key));
    return element;
  }

  let made = new Map(); // rows of the list that are made

  // Makes the rows that are in the window of the list, and a few more.
  function draw(anew = true) {
    const [list, height] = [at("list"), ROW * rem()];
    at("rows").style.height = `${found.length * ROW}rem`;
    const first = Math.max(0, Math.floor(list.scrollTop / height) - SPARE);
    const last = Math.ceil((list.scrollTop + list.clientHeight) / height) + SPARE;
    const kept = new Map();
    found.slice(first, last).forEach((key, index) => {
      const name = `${key}\n${first + index}`;
      kept.set(name, (!anew && made.get(name)) || row(key, first + index));
    });
    for (const [name, element] of made) if (kept.get(name) !== element) element.remove();
    at("rows").append(...[...kept].filter(([name, element]) => made.get(name) !== element).map(([, element]) => element));
    made = kept;
    list.setAttribute("aria-activedescendant", `row-${found.indexOf(now)}`);
  }

  function scrollTo(index) {
    const [list, height] = [at("list"), ROW * rem()];
    if (index * height < list.scrollTop) list.scrollTop = index * height;
    if ((index + 1) * height > list.scrollTop + list.clientHeight) list.scrollTop = (index + 1) * height - list.clientHeight;
  }

  // -- one item -----------------------------------------------------------------------------------

  function move(step) {
    if (!found.length) return;
    const index = found.indexOf(now);
    show(found[Math.max(0, Math.min(found.length - 1, index < 0 ? 0 : index + step))]);
  }

  function show(key, anew = true) {
    const item = items.get(key);
    if (!item) return;
    const other = key !== now;
    now = key;
    if (anew) {
      conflict = null;
      say("");
    }
    at("conflict").hidden = !conflict;
    at("name").textContent = item.stem;
    at("place").textContent = hasFile(item) ? item.path : `${item.path} (not written yet)`;
    at("fixed").textContent = [item.fixed, item.fault].filter(Boolean).join("; ");
    at("made-box").hidden = !(item.by || item.made !== null);
    at("by").textContent = item.by ? `by ${item.by}` : "";
    at("made").textContent = item.made ?? (item.awaits ? "not made yet, or not up to date: a build makes it" : "");
    const text = drafts.get(key) ?? textOf(item);
    if (other || at("text").value !== text) at("text").value = text;
    at("text").readOnly = Boolean(item.fixed);
    at("back").disabled = !(hasFile(item) && item.captioner && !item.fixed);
    if (other) {
      const image = at("picture");
      image.hidden = item.picture === null;
      at("no-picture").hidden = item.picture !== null;
      image.alt = item.stem;
      if (item.picture !== null) image.src = picture(item, "large");
      const next = items.get(found[found.indexOf(key) + 1]); // so that it is here when it is asked for
      if (next && next.picture !== null) new Image().src = picture(next, "large");
    }
    scrollTo(found.indexOf(key));
    draw();
    count();
  }

  at("picture").addEventListener("load", ({ target }) => target.classList.toggle("pixels", target.naturalWidth < PIXELS));
  at("picture").addEventListener("error", () => { at("picture").hidden = true; at("no-picture").hidden = false; });

  let waiting = 0;
  function count() {
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      const [key, item, text] = [now, items.get(now), at("text").value];
      if (!item || (!text && !hasFile(item))) return at("tokens").replaceChildren();
      const result = await ask("tokens", { dataset: item.dataset, stem: item.stem, text });
      if (key !== now || text !== at("text").value) return undefined;
      return at("tokens").replaceChildren(...(result.texts ?? []).map((row) => tokens(row, result.encoders)),
        make("p", "fault", result.fault ?? result.what));
    }, 150);
  }

  // A text as it is encoded, with the tokens that each encoder sees.
  function tokens([parts, seen], encoders) {
    const element = make("div");
    element.append(encoded(make("p", "text"), parts), ...counts(seen, encoders));
    return element;
  }

  at("text").addEventListener("input", () => {
    const item = items.get(now);
    if (!item) return;
    if (at("text").value === textOf(item)) drafts.delete(now);
    else drafts.set(now, at("text").value);
    draw();
    count();
  });

  // -- changes ------------------------------------------------------------------------------------

  async function save(next) {
    const [key, item, text] = [now, items.get(now), drafts.get(now)];
    if (!item) return;
    if (text === undefined) {
      say("There is nothing to save.");
    } else {
      const result = await ask("save", { dataset: item.dataset, stem: item.stem, text, base: item.base });
      done(key, result, drafts.get(key) === text);
      if (!result.ok) return;
    }
    if (next) move(1);
  }

  function done(key, result, ends) {
    if (result.ok && ends) drafts.delete(key);
    if (result.status === 409 && result.caption) {
      conflict = result.caption;
      if (!drafts.has(key)) drafts.set(key, at("text").value);
      items.set(key, conflict);
      at("theirs").textContent = hasFile(conflict) ? conflict.written ?? "no text" : `no file any more; made: ${conflict.made ?? "nothing"}`;
      show(key, false);
      at("keep-mine").focus();
    } else {
      learn(result);
      if (result.ok) show(now);
    }
    say([result.done ?? result.what, ...(result.kept ?? [])].filter(Boolean).join("; "));
  }

  at("keep-mine").addEventListener("click", () => {
    conflict = null;
    at("text").focus();
    save(false);
  });
  at("take-theirs").addEventListener("click", () => {
    drafts.delete(now);
    show(now);
    at("text").focus();
  });

  async function back() {
    const [key, item] = [now, items.get(now)];
    if (item && !at("back").disabled) done(key, await ask("back", { dataset: item.dataset, stem: item.stem, base: item.base }), true);
  }

  async function undo() {
    if (state.undo) done(now, await ask("undo", { number: state.undo[0] }), false);
  }

  // -- find and replace ---------------------------------------------------------------------------

  const terms = (preview) => ({
    ...{ find: at("find").value, put: at("put").value, preview },
    ...{ words: at("complete").checked, case: at("case").checked, made: at("also-made").checked },
  });

  async function replace(apply) {
    const result = await ask("replace", terms(apply ? state.preview : ""));
    state.preview = "";
    at("apply").disabled = true;
    if (!result.ok || apply) {
      at("replace-said").textContent = result.what ?? "";
      at("changes").replaceChildren();
      if (result.ok) {
        at("replace").close();
        done(now, result, false);
        at("list").focus();
      }
      return;
    }
    state.preview = result.count ? result.preview : "";
    at("apply").disabled = !result.count;
    at("apply").textContent = result.count ? `Apply to ${result.count}` : "Apply";
    const more = result.count > result.rows.length ? `; the first ${result.rows.length} are shown` : "";
    const empty = result.emptied ? `; ${result.emptied} would be empty and stay` : "";
    at("replace-said").textContent = `${result.count === 1 ? "1 caption changes" : `${result.count} captions change`}${more}${empty}`;
    at("changes").replaceChildren(...result.rows.map(([, stem, before, after]) => {
      const element = make("p");
      element.append(make("b", "", `${stem} `), ...edited(before, after));
      return element;
    }));
    if (result.count) at("apply").focus();
  }

  at("replace").querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    replace(false);
  });
  for (const name of ["find", "put", "complete", "case", "also-made"]) {
    at(name).addEventListener("input", () => { state.preview = ""; at("apply").disabled = true; });
  }
  at("apply").addEventListener("click", () => replace(true));
  const openReplace = () => { at("replace-said").textContent = ""; at("changes").replaceChildren(); at("replace").showModal(); at("find").select(); };

  // -- keys and buttons ---------------------------------------------------------------------------

  const LIST = {
    ...{ ArrowDown: () => move(1), ArrowUp: () => move(-1), Home: () => move(-Infinity), End: () => move(Infinity) },
    ...{ Enter: () => at("text").focus(), "/": () => at("words").focus(), f: () => at("filter").focus() },
    ...{ r: openReplace, u: undo, b: back, "?": () => at("keys").showModal() },
  };
  document.addEventListener("keydown", (event) => {
    const control = event.ctrlKey || event.metaKey;
    const { key, target } = event;
    if (event.altKey || document.querySelector("dialog[open]")) return;
    let action = { PageDown: () => move(1), PageUp: () => move(-1) }[key];
    if (control) action = { s: () => save(false), Enter: () => save(true) }[key];
    else if (key === "Escape" && target !== at("list")) action = () => at("list").focus();
    else if (target === at("list") || target === document.body) action = LIST[key] ?? action;
    else if (target === at("words") && (key === "Enter" || key === "ArrowDown")) action = () => { at("list").focus(); if (!found.includes(now)) move(0); };
    if (!action) return;
    event.preventDefault();
    action();
  });
  for (const [name, action] of Object.entries({
    ...{ save: () => save(false), "save-next": () => save(true), back, undo, before: () => move(-1), after: () => move(1) },
    ...{ "open-replace": openReplace, "open-keys": () => at("keys").showModal(), "close-keys": () => at("keys").close() },
    "close-replace": () => at("replace").close(),
  })) at(name).addEventListener("click", action);
  addEventListener("beforeunload", (event) => { if (drafts.size) event.preventDefault(); });
  at("list").addEventListener("scroll", () => requestAnimationFrame(() => draw(false)), { passive: true });
  addEventListener("resize", () => draw(false));
  for (const name of ["words", "filter", "dataset"]) at(name).addEventListener("input", filter);
  for (const [value, [text]] of Object.entries(FILTERS)) at("filter").append(new Option(text, value));

  ask("load").then((result) => {
    learn(result);
    chooseDataset(items.values());
    at("filter").querySelector("[value=changed]").hidden = !result.trained;
    filter();
    move(0);
    at("list").focus();
    poll();
  });
})();
