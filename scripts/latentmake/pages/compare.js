(() => {
  const { sides, rows, steps, pictures } = data;
  const clips = new Set(data.clips);
  const columns = steps.length ? steps : ["*"];
  const where = (step) => (step === "*" ? "all steps" : `step ${step}`);

  // -- pictures ---------------------------------------------------------------------------------

  // A side's picture of a prompt at a step: its number, why there is none, or undefined; and when it was drawn.
  function cell(side, row, step) {
    const cells = side.cells[row];
    return cells[step] === undefined ? [cells["*"], "*"] : [cells[step], step];
  }

  function picture(number, words) {
    const [source, width, height, pixels] = pictures[number];
    const element = make(clips.has(number) ? "video" : "img", pixels ? "pixels" : "");
    Object.assign(element, { src: source, width, height, muted: true, playsInline: true });
    element.setAttribute(clips.has(number) ? "aria-label" : "alt", words);
    return element;
  }

  function missing(found) {
    return make("p", "missing", found ? `This picture ${found}.` : "No picture of this prompt at this step.");
  }

  const words = (side, row, step) => `${side.name}, ${where(step)}: ${rows[row]}`;

  function figure(side, row, step) {
    const [element, open, [found, drawn]] = [make("figure"), make("button", "open"), cell(side, row, step)];
    if (drawn === "*" && step !== columns.at(-1)) return ""; // of the finished weights: once
    open.type = "button";
    open.addEventListener("click", () => enlarge(row, step));
    if (typeof found === "number") open.append(picture(found, words(side, row, drawn)));
    else element.append(make("p", "missing", found ? missing(found).textContent : "no picture"));
    element.append(...(open.hasChildNodes() ? [open] : []), make("figcaption", "", where(drawn === "*" && found === undefined ? step : drawn)));
    element.style.gridColumn = columns.indexOf(step) + 1;
    return element;
  }

  rows.forEach((text, row) => {
    const [box, scroll] = [make("article", "item"), make("div", "scroll")];
    for (const side of sides) {
      const strip = make("div", "strip");
      strip.append(...columns.map((step) => figure(side, row, step)));
      scroll.append(...(sides.length > 1 ? [make("p", "name", side.name)] : []), strip);
    }
    box.append(make("h2", "", text), scroll);
    at("grid").append(box);
  });
  const play = clips.size ? playItems(new Player(data.fps)) : () => {};

  // -- enlarged: all sides at one prompt and step -------------------------------------------------

  function side(one, row, step) {
    const [element, caption, frame, [found, drawn]] = [make("figure"), make("figcaption"), make("div", "frame"), cell(one, row, step)];
    const there = typeof found === "number";
    caption.append(make("span", "name", one.name), make("span", "note", there ? where(drawn) : "missing"));
    frame.append(there ? picture(found, words(one, row, drawn)) : missing(found));
    element.append(caption, frame);
    const path = one.weights[drawn];
    if (there) element.append(path ? copyable(path) : make("p", "quiet", "No weights of this step are kept."));
    return element;
  }

  function enlarge(row, step) {
    const box = make("div", "sides");
    box.append(...sides.map((one) => side(one, row, step)));
    const title = steps.length ? `${rows[row]} (step ${step})` : rows[row];
    viewer.show(title, [box], (right, down) => {
      const across = steps.length ? right : 0;
      enlarge(within(row + down + (steps.length ? 0 : right), rows), columns[within(columns.indexOf(step) + across, columns)]);
    });
    play();
    const address = `#prompt=${row + 1}${steps.length ? `&step=${step}` : ""}`;
    if (location.hash !== address) location.replace(address);
  }

  viewer.element.addEventListener("close", () => {
    history.replaceState(null, "", "#");
    at("shown").replaceChildren();
    play();
  });

  // The address keeps what is enlarged.
  function read() {
    const parts = new URLSearchParams(location.hash.slice(1));
    const whole = (name) => (/^\d+$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : undefined);
    if (whole("prompt") === undefined || !rows.length) return;
    // A step that there is not gives the last one before it.
    const step = steps.filter((each) => each <= (whole("step") ?? Infinity)).length - 1;
    enlarge(within(whole("prompt") - 1, rows), columns[within(step, columns)]);
  }

  // -- losses, weights and settings ---------------------------------------------------------------

  const lines = data.losses.map(([name, loss, points], index) => ({
    name: loss === "loss" ? name : `${name}, ${loss.replaceAll("_", " ")}`, points, kind: `line${(index % 4) + 1}`,
  })).filter(({ points }) => points.length);
  at("losses").hidden = !lines.length;
  if (lines.length) at("losses").lastElementChild.append(chart("Loss by step", "step", lines, Math.max(1, ...lines.flatMap(({ points }) => points.map(([step]) => step)))));

  const kept = sides.flatMap((one) => Object.entries(one.weights).filter(([step]) => step !== "*").map(([step, path]) => [one.name, step, copyable(path)]));
  data.tables = [{ id: "weights", title: "LoRA of each step", words: kept.length ? "Files that are kept. Set save_every_n_steps of the trainer to keep more of them." : "No files are kept.", heads: ["run", "step", "file"], rows: kept }];
  showTables();

  const settings = data.settings.map(([key, values]) => [key, ...values]);
  const equal = settings.filter(([, first, ...others]) => others.every((value) => value === first));
  const differing = settings.filter((line) => !equal.includes(line));
  at("differing").append(table(["setting", ...sides.map((one) => one.name)], differing));
  at("differing").hidden = !differing.length;
  at("equal").lastElementChild.append(table(["setting", "value"], equal.map((line) => line.slice(0, 2))));
  at("equal").querySelector("summary").textContent = sides.length > 1 ? `${equal.length} settings are equal` : `${equal.length} settings`;
  window.addEventListener("hashchange", read);
  read();
})();
