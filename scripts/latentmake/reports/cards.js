(() => {
  const MOST = 24; // items that are shown at first; a button shows more
  const PIXELS = 128; // smaller pictures are shown pixel by pixel
  const COLOURS = ["#ffd33d", "#3ddcff", "#ff7ad9", "#8dff6a"]; // of crops, by resolution
  const state = { dataset: "", words: "", cut: false, most: MOST };
  const datasets = [...new Set(data.items.map((item) => item.dataset))];
  const isCut = ([, seen]) => seen.some(([tokens, kept]) => kept < tokens);

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

  // The picture, with the crop of each resolution; what no resolution keeps is dark.
  function picture(item) {
    const [frame, image] = [make("div", "frame"), make("img")];
    image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth < PIXELS));
    image.src = item.picture;
    image.alt = item.stem;
    frame.append(image);
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

  function line([parts, seen]) {
    const [element, text] = [make("li"), make("span", "text")];
    if (parts.every((part) => part === "")) text.append("(the empty caption)");
    text.classList.toggle("empty", text.hasChildNodes());
    text.append(parts[0]);
    if (parts[1]) text.append(make("span", "some", parts[1]));
    if (parts[2]) text.append(make("del", "", parts[2]));
    element.append(text);
    seen.forEach(([tokens, kept], index) => {
      const { name } = data.encoders[index];
      const count = tokens > kept ? `${tokens} tokens, ${tokens - kept} cut` : `${tokens} tokens`;
      const badge = make("span", tokens > kept ? "badge over" : "badge", seen.length > 1 ? `${name}: ${count}` : count);
      badge.title = name;
      element.append(badge);
    });
    return element;
  }

  function card(item) {
    const element = make("article", item.picture ? "item" : "item plain");
    const [side, name, list] = [make("div"), make("h3", "", item.stem), make("ol", item.texts.length > 1 ? "" : "single")];
    name.append(make("span", "", `  ${[datasets.length > 1 ? item.dataset : "", item.size].filter(Boolean).join(", ")}`));
    name.title = item.path;
    list.start = 0;
    list.append(...item.texts.map(line));
    side.append(name, ...(item.fault ? [make("p", "fault", item.fault)] : []), list);
    item.targets.forEach(({ words, crop }, index) => {
      const target = make("p", "target", words);
      if (crop) target.prepend(mark(index));
      side.append(target);
    });
    if (item.picture) element.append(picture(item));
    element.append(side);
    return element;
  }

  // -- items to show ----------------------------------------------------------------------------

  function show(values) {
    Object.assign(state, { most: MOST }, values);
    const words = state.words.toLowerCase();
    const found = data.items.filter((item) => (!state.dataset || item.dataset === state.dataset)
      && (!state.cut || item.texts.some(isCut))
      && (!words || [item.stem, ...item.texts.map(([parts]) => parts.join(""))].some((text) => text.toLowerCase().includes(words))));
    at("cards").replaceChildren(...found.slice(0, state.most).map(card));
    at("more").hidden = found.length <= state.most;
    at("status").textContent = [`${found.length} of ${data.items.length} items.`, ...data.notes].join(" ");
    at("cut").setAttribute("aria-pressed", String(state.cut));
  }

  for (const [value, text] of [["", "All datasets"], ...datasets.map((name) => [name, name])]) at("dataset").append(new Option(text, value));
  at("dataset").parentElement.hidden = datasets.length < 2;
  at("dataset").addEventListener("change", (event) => show({ dataset: event.target.value }));
  at("words").addEventListener("input", (event) => show({ words: event.target.value }));
  at("cut").addEventListener("click", () => show({ cut: !state.cut }));
  at("more").addEventListener("click", () => show({ most: state.most + 10 * MOST }));

  // -- the other sections -----------------------------------------------------------------------

  for (const [name, value, word] of data.facts) {
    const fact = make("div");
    fact.append(make("dt", "", name), make("dd", word, value));
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
    for (const [name, source] of data.training.pictures) {
      const image = make("img");
      Object.assign(image, { src: source, alt: name });
      at("training").append(image);
    }
  }
  showTables();
  document.querySelector(".key .some").hidden = data.encoders.length < 2;
  document.querySelector(".key").hidden = !data.encoders.length;
  for (const section of document.querySelectorAll("main section.card:not([hidden])")) {
    const link = make("a", "", section.querySelector("h2").textContent);
    link.href = `#${section.id}`;
    at("sections").append(link);
  }
  show({});
})();
