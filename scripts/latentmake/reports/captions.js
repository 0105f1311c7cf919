(() => {
  const PAGE = 50; // items
  const state = { dataset: -1, words: "", cut: false };

  showEncoders(data.encoders);
  document.querySelector(".key .some").hidden = data.encoders.length < 2;
  if (data.faults.length) {
    at("faults").hidden = false;
    for (const fault of data.faults) at("faults").querySelector("ul").append(make("li", "", fault));
  }

  // -- items ------------------------------------------------------------------------------------

  const isCut = (text) => text[1].some(([tokens, kept]) => kept < tokens);
  const whole = (text) => text[0].join("");

  function row(item) {
    const element = make("article", item.picture ? "item" : "item plain");
    if (item.picture) {
      const image = make("img");
      image.src = item.picture;
      image.alt = "";
      element.append(image);
    }
    const side = make("div");
    const name = make("h3", "", item.stem);
    if (data.datasets.length > 1) name.append(make("span", "", `  ${data.datasets[item.dataset]}`));
    const list = make("ol", item.texts.length > 1 ? "" : "single");
    if (item.texts.length > 1) list.start = 0;
    for (const text of item.texts) {
      const line = make("li");
      const [seen, some, none] = text[0];
      const span = make("span", "text");
      if (whole(text) === "") {
        span.className = "text empty";
        span.textContent = "(the empty caption)";
      } else {
        span.append(seen);
        if (some) span.append(make("span", "some", some));
        if (none) span.append(make("del", "", none));
      }
      line.append(span);
      text[1].forEach(([tokens, kept], index) => {
        const over = kept < tokens;
        const encoder = data.encoders[index];
        const label = over ? `${tokens} tokens, ${tokens - kept} cut` : `${tokens} tokens`;
        const badge = make("span", over ? "badge over" : "badge", label);
        badge.title = encoder.name;
        if (data.encoders.length > 1) badge.textContent = `${encoder.name}: ${label}`;
        line.append(badge);
      });
      list.append(line);
    }
    side.append(name, list);
    element.append(side);
    return element;
  }

  function wanted() {
    const words = state.words.toLowerCase();
    return data.items.filter((item) =>
      (state.dataset < 0 || item.dataset === state.dataset)
      && (!state.cut || item.texts.some(isCut))
      && (!words || item.stem.toLowerCase().includes(words)
        || item.texts.some((text) => whole(text).toLowerCase().includes(words))));
  }

  const show = showPages(at("items"), PAGE, wanted, row, (count) => {
    const left = data.total - data.items.length;
    const more = left ? ` ${left} more are in the JSONL file beside this page.` : "";
    at("status").textContent = `${count} of ${data.items.length} items.${more}`;
    at("cut").setAttribute("aria-pressed", String(state.cut));
  });

  function change(values) {
    Object.assign(state, values);
    show();
  }

  for (const [index, name] of [[-1, "All datasets"], ...data.datasets.entries()]) {
    const option = make("option", "", name);
    option.value = index;
    at("dataset").append(option);
  }
  at("dataset").parentElement.hidden = data.datasets.length < 2;
  at("dataset").addEventListener("change", (event) => change({ dataset: Number(event.target.value) }));
  at("words").addEventListener("input", (event) => change({ words: event.target.value }));
  at("cut").addEventListener("click", () => change({ cut: !state.cut }));
  show();
})();
