(() => {
  const BATCH = 60; // cards that are made at once, as the page is scrolled
  const HEAD = 40; // characters that are shown before an edit
  const TEXTS = 3; // of an item on its card; all are in the viewer
  const PIXELS = 128; // smaller pictures are shown pixel by pixel
  const SHOWN = /\.(jpe?g|png|webp|gif|bmp|avif)$/i; // endings of files that browsers show
  const COLOURS = ["#ffd33d", "#3ddcff", "#ff7ad9", "#8dff6a"]; // of crops, by resolution
  const datasets = chooseDataset(data.items);
  const state = { dataset: "", words: "", word: data.word, sort: "name", on: new Set() };
  let found = []; // the items that are shown
  let made = 0; // number of their cards so far

  // -- what items are ---------------------------------------------------------------------------

  const textOf = ([parts]) => parts.join("");
  const lengthOf = (item) => Math.max(0, ...item.texts.map((text) => textOf(text).length));
  const isCut = ([, seen]) => seen.some(([tokens, kept]) => kept < tokens);
  const lossOf = ({ crop }) => (crop ? 1 - (crop[2] - crop[0]) * (crop[3] - crop[1]) : 0);
  const loss = (item) => Math.max(0, ...item.targets.map(lossOf));
  const pixels = ({ size }) => (size ? size[0] * size[1] : 0);
  const percent = (share) => `${Math.round(100 * share)} %`;
  const address = (path) => (path.startsWith("/") ? "file://" : data.root) + path.split("/").map(encodeURIComponent).join("/");

  function lacks(item) {
    const word = state.word.trim().replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    const pattern = new RegExp(`(?<![\\p{L}\\p{N}])${word}(?![\\p{L}\\p{N}])`, "iu");
    return Boolean(word) && !item.texts.every((text) => pattern.test(textOf(text)));
  }

  // Name -> its words, which items it leaves, and whether the page can tell.
  const FILTERS = {
    edited: ["Edited since training", ({ before, repainted }) => before || repainted, data.trained],
    new: ["New since training", (item) => item.new, data.trained],
    stale: ["Stale", (item) => item.stale.length, data.plans],
    enlarged: ["Enlarged", (item) => item.targets.some((target) => target.enlarged), true],
    cropped: ["Cropped by more than a third", (item) => loss(item) > 1 / 3, true],
    empty: ["Empty caption", (item) => item.texts.some((text) => !textOf(text)), true],
    cut: ["Text cut", (item) => item.texts.some(isCut), data.encoders.length],
    faulty: ["Faulty", (item) => item.fault, true],
    lacking: ["Without the word", lacks, true],
  };
  const ORDERS = {
    name: ["Name", null],
    small: ["Smallest picture first", (a, b) => pixels(a) - pixels(b)],
    large: ["Largest picture first", (a, b) => pixels(b) - pixels(a)],
    short: ["Shortest caption first", (a, b) => lengthOf(a) - lengthOf(b)],
    long: ["Longest caption first", (a, b) => lengthOf(b) - lengthOf(a)],
    crop: ["Most cropped first", (a, b) => loss(b) - loss(a)],
  };

  // -- one item ---------------------------------------------------------------------------------

  function place(box, [left, top, right, bottom]) {
    const shares = { left, top, width: right - left, height: bottom - top };
    for (const [side, share] of Object.entries(shares)) box.style[side] = `${100 * share}%`;
    return box;
  }

  function mark(index) {
    const box = make("i");
    box.style.color = COLOURS[index % COLOURS.length];
    return box;
  }

  function image(source, name) {
    const element = make("img");
    element.addEventListener("load", () => element.classList.toggle("pixels", element.naturalWidth < PIXELS));
    Object.assign(element, { src: source, alt: name });
    return element;
  }

  // The picture, with the crop of each resolution; what no resolution keeps is dark.
  function picture(item, enlarged) {
    const [frame, file] = [make("span", "frame"), !item.remote && SHOWN.test(item.path) && address(item.path)];
    if (!item.picture && (!file || item.fault)) return make("span", "none", "no picture");
    const shown = image(item.picture ?? file, item.stem);
    frame.append(shown);
    const ratio = item.size ? item.size[0] / item.size[1] : 1;
    frame.style.setProperty("--ratio", ratio);
    if (enlarged && file && item.picture) { // the file itself, if it lies beside the page and is not turned
      const whole = image(file, item.stem);
      whole.addEventListener("load", () => {
        if (Math.abs(whole.naturalWidth / whole.naturalHeight / ratio - 1) < 0.02) shown.replaceWith(whole);
      });
    }
    const crops = item.targets.map(({ crop }) => crop);
    const known = crops.filter(Boolean);
    if (known.length) {
      const kept = [0, 1, 2, 3].map((side) => Math[side < 2 ? "min" : "max"](...known.map((crop) => crop[side])));
      frame.append(place(make("i", "kept"), kept));
    }
    crops.forEach((crop, index) => {
      if (!crop) return;
      const box = place(mark(index), crop);
      box.style.outlineOffset = `${-2 - 4 * index}px`; // crops that are the same stay apart
      frame.append(box);
    });
    return frame;
  }

  // A text with its tokens; `before` is what the training saw in its place, where that was another.
  function line([parts, seen], before) {
    const [element, text] = [make("li"), make("span", "text")];
    if (before !== undefined) {
      const [edit, [head, ...others]] = [make("span", "edit"), edited(before, parts.join(""))];
      edit.append(make("b", "", "Since the training: "), head.length > HEAD ? `…${head.slice(-HEAD)}` : head, ...others);
      element.append(edit);
    }
    if (parts.every((part) => part === "")) text.append("(the empty caption)");
    text.classList.toggle("empty", text.hasChildNodes());
    element.append(encoded(text, parts), ...counts(seen, data.encoders.map(({ name }) => name)));
    return element;
  }

  function badges(item) {
    const words = [item.new && "new since the training", item.before && "caption edited", item.repainted && "picture edited"];
    const row = make("p", "badges");
    for (const word of words.filter(Boolean)) row.append(make("span", "badge over", word), " ");
    for (const word of item.stale) row.append(make("span", "badge", `stale ${word}`), " ");
    if (item.by) row.append(make("span", "badge", `by ${item.by}`), " ");
    return row;
  }

  function target(item, { words, crop, enlarged }, index) {
    const [element, lost] = [make("p", "target", item.targets.length > 1 ? words : words.replace(/^\S+ → /, "")), lossOf({ crop })];
    if (crop) element.prepend(mark(index));
    if (lost >= 0.005) element.append(make("span", lost > 1 / 3 ? "warn" : "", `, ${percent(lost)} cropped`));
    if (enlarged) element.append(make("span", "warn", ", enlarged"));
    return element;
  }

  // Name, texts and crops of an item; at most some texts.
  function about(item, most) {
    const [side, list] = [make("div", "about"), make("ol", item.texts.length > 1 ? "" : "single")];
    list.start = 0;
    const was = (index) => (item.before && item.before[index] !== textOf(item.texts[index]) ? item.before[index] ?? "" : undefined);
    list.append(...item.texts.slice(0, most).map((text, index) => line(text, was(index))));
    side.append(badges(item), ...(item.fault ? [make("p", "fault", item.fault)] : []), list);
    if (item.texts.length > most) side.append(make("p", "target", `and ${item.texts.length - most} more texts`));
    side.append(...item.targets.map((each, index) => target(item, each, index)));
    return side;
  }

  const sizeOf = (item) => (item.size ? item.size.join(" × ") : "");

  function card(item, index) {
    const [element, open, name] = [make("article", "item"), make("button", "open"), make("h3", "", item.stem)];
    open.type = "button";
    open.setAttribute("aria-label", `Enlarge ${item.stem}`);
    open.append(picture(item));
    open.addEventListener("click", () => enlarge(index));
    name.append(make("span", "", `  ${[datasets.length > 1 ? item.dataset : "", sizeOf(item)].filter(Boolean).join(", ")}`));
    name.title = item.path;
    element.append(open, name, about(item, TEXTS));
    return element;
  }

  function enlarge(index) {
    const item = found[index];
    const [box, side, list] = [make("div", "enlarged"), about(item, Infinity), make("p", "files")];
    for (const path of new Set([item.path, item.caption].filter(Boolean))) {
      const link = make("a", "", path);
      if (!item.remote) link.href = address(path.replace(/: line \d+$/, ""));
      list.append(link, make("br"));
    }
    side.prepend(make("p", "quiet", [item.dataset, sizeOf(item)].filter(Boolean).join(", ")), list);
    box.append(picture(item, true), side);
    const move = (right) => (right ? enlarge(within(index + right, found)) : false);
    viewer.show(`${item.stem} (${index + 1} of ${found.length})`, [box], move);
  }

  // A picture of the training, which is enlarged as the items are.
  function shot([name, source], index) {
    const [figure, open] = [make("figure"), make("button", "open")];
    open.type = "button";
    open.setAttribute("aria-label", `Enlarge: ${name}`);
    open.append(Object.assign(make("img"), { src: source, alt: name }));
    open.addEventListener("click", () => enlargeShot(index));
    figure.append(make("figcaption", "", name), open);
    return figure;
  }

  function enlargeShot(index) {
    const { pictures } = data.training;
    const [name, source] = pictures[index];
    const move = (right) => (right ? enlargeShot(within(index + right, pictures)) : false);
    viewer.show(name, [Object.assign(make("img", "whole"), { src: source, alt: name })], move);
  }

  // -- items to show ----------------------------------------------------------------------------

  function more() {
    at("cards").append(...found.slice(made, made + BATCH).map((item, index) => card(item, made + index)));
    made = Math.min(found.length, made + BATCH);
  }

  // Makes cards until the end of them is far below the window.
  function fill() {
    while (made < found.length && at("end").getBoundingClientRect().top < 3 * innerHeight) more();
  }

  function show(values) {
    Object.assign(state, values);
    const words = state.words.toLowerCase();
    const filters = [...state.on].map((name) => FILTERS[name][1]);
    found = data.items.filter((item) => (!state.dataset || item.dataset === state.dataset)
      && filters.every((filter) => filter(item))
      && (!words || [item.stem, ...item.texts.map(textOf)].some((text) => text.toLowerCase().includes(words))));
    const order = ORDERS[state.sort][1];
    if (order) found.sort(order);
    at("cards").replaceChildren();
    made = 0;
    more();
    fill();
    at("status").firstChild.textContent = `${found.length} of ${data.items.length} items.`;
    at("fold").querySelector("summary").textContent = state.on.size ? `Filters (${state.on.size} on)` : "Filters";
    for (const [name, button] of buttons) button.setAttribute("aria-pressed", String(state.on.has(name)));
  }

  // Turns a filter on or off.
  function turn(name, on = !state.on.has(name)) {
    state.on[on ? "add" : "delete"](name);
    show({});
  }

  const buttons = Object.entries(FILTERS).filter(([, [, , tells]]) => tells).map(([name, [words, filter]]) => {
    const button = name === "lacking" ? at("lacking").firstChild : make("button");
    button.type = "button";
    button.id = name === "lacking" ? "without" : name;
    button.addEventListener("click", () => turn(name));
    if (name !== "lacking") {
      const count = data.items.filter(filter).length;
      button.disabled = !count;
      button.append(`${words} `, make("span", "count", String(count)));
      at("lacking").before(button);
    }
    return [name, button];
  });
  const counted = () => {
    const button = at("without");
    button.replaceChildren("Without the word ", make("span", "count", state.word.trim() ? String(data.items.filter(lacks).length) : ""));
    button.disabled = !state.word.trim();
  };
  at("word").value = state.word;
  at("word").addEventListener("input", (event) => {
    state.word = event.target.value;
    counted();
    turn("lacking", Boolean(state.word.trim()));
  });
  counted();

  for (const [value, [text]] of Object.entries(ORDERS)) at("sort").append(new Option(text, value));
  at("dataset").addEventListener("change", (event) => show({ dataset: event.target.value }));
  at("sort").addEventListener("change", (event) => show({ sort: event.target.value }));
  at("words").addEventListener("input", (event) => show({ words: event.target.value }));

  // On a phone the filters are folded, so that the cards are seen first.
  const phone = matchMedia("(max-width: 40rem)");
  const fold = () => at("fold").toggleAttribute("open", !phone.matches);
  phone.addEventListener("change", fold);
  fold();
  new IntersectionObserver(fill, { rootMargin: "200%" }).observe(at("end"));

  // -- the other sections -----------------------------------------------------------------------

  for (const [name, value, word] of data.facts) {
    const [fact, text] = [make("div"), make("dd", word, value)];
    if (word === "warn" && data.items.some(FILTERS.stale[1])) {
      const link = make("a", word, value);
      link.href = "#items";
      link.addEventListener("click", () => turn("stale", true));
      text.replaceChildren(link);
    }
    fact.append(make("dt", "", name), text);
    at("summary").append(fact);
  }

  for (const { name, limit, texts, cut, median, longest, width, bars } of data.encoders) {
    const [element, chart, axis] = [make("div", "card encoder"), make("div", "bars"), make("div", "axis")];
    bars.forEach((count, index) => {
      const bar = make("div", limit !== null && index * width > limit ? "over" : "");
      bar.style.height = count ? `${Math.max(2, (100 * count) / Math.max(...bars))}%` : 0;
      bar.title = `${index * width} to ${(index + 1) * width - 1} tokens: ${count}`;
      chart.append(bar);
    });
    axis.append(make("span", "", "0"), make("span", "", `${bars.length * width - 1} tokens`));
    element.append(make("h2", "", name),
      make("p", "quiet", `${limit === null ? "sees every token" : `sees ${limit} tokens`}; half of the texts have ${median} or fewer, the longest ${longest}`),
      make("p", cut ? "warn" : "", cut ? `${cut} of ${texts} texts are cut.` : "No text is cut."), chart, axis);
    at("encoders").append(element);
  }

  at("faults").hidden = !data.faults.length;
  at("faults").querySelector("ul").append(...data.faults.map((fault) => make("li", "", fault)));
  if (data.training) {
    at("training").hidden = false;
    at("training").querySelector("p").textContent = data.training.words;
    at("training").querySelector(".pictures").append(...data.training.pictures.map(shot));
  }
  showTables();
  document.querySelector(".key .some").hidden = data.encoders.length < 2;
  document.querySelector(".key").hidden = !data.items.some(({ texts }) => texts.some(([parts]) => parts[1] || parts[2]));
  at("status").querySelector("span").textContent = data.notes.join(" ");
  for (const section of document.querySelectorAll("main section:not([hidden])")) {
    const head = section.querySelector(":scope > h2");
    if (!head) continue;
    const link = make("a", "", head.textContent);
    link.href = `#${section.id}`;
    at("sections").append(link);
  }
  show({});
})();
