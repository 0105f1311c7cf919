(() => {
  const { sides, rows, steps, pictures } = data;
  const word = data.rows_are;
  const ZOOMS = [1, 1.5, 2, 3, 4, 6, 8, 12, 16];
  const clips = new Set(data.clips);
  const player = clips.size ? new Player(data.fps) : null;
  const state = { row: 0, step: Math.max(0, steps.length - 1), zoom: 1, fill: false, x: 0, y: 0 };

  // -- what is to be seen ---------------------------------------------------------------------

  /** Returns what a side shows at the state's row and step, and the steps around it that it has. */
  function look(side) {
    const cells = side.cells[state.row];
    const step = steps[state.step];
    const own = Object.keys(cells).filter((key) => key !== "*").map(Number).sort((a, b) => a - b);
    const exact = cells[step] ?? cells["*"];
    const earlier = own.filter((each) => each < step).pop();
    const later = own.find((each) => each > step);
    const shared = cells[step] === undefined && cells["*"] !== undefined;
    return { exact, earlier, later, shared, none: own.length === 0 && cells["*"] === undefined,
      before: earlier === undefined ? undefined : cells[earlier] };
  }

  function sentence(found) {
    if (found.none) return word === "picture" ? "It has no such picture." : `No picture of this ${word}.`;
    const missing = `No picture at step ${steps[state.step]}.`;
    if (found.earlier !== undefined) return `${missing} The nearest earlier one is of step ${found.earlier}.`;
    return `${missing} There is none before; the first is of step ${found.later}.`;
  }

  const figures = sides.map((side) => {
    const figure = make("figure");
    const caption = make("figcaption");
    const name = make("span", "name", side.name);
    const note = make("span", "note");
    const frame = make("div", "frame");
    const image = make("img");
    const video = make("video");
    const missing = make("div", "missing");
    const text = make("p");
    const go = make("button");
    go.type = "button";
    image.draggable = false;
    video.muted = video.playsInline = true;
    video.preload = "auto";
    caption.append(name, note);
    missing.append(text, go);
    frame.append(image, video, missing);
    figure.append(caption, frame);
    at("sides").append(figure);
    return { side, figure, note, frame, image, video, shown: image, missing, text, go, picture: null };
  });

  /** Takes away what one of a view's two elements showed, where the other or none is in use. */
  function empty({ image, video }, used) {
    if (used !== image) {
      image.removeAttribute("src");
      image.alt = "";
    }
    if (used !== video && video.hasAttribute("src")) {
      video.removeAttribute("src");
      video.load();
    }
  }

  function show(view) {
    const { side, image, video, note } = view;
    const found = look(side);
    let number = found.exact;
    let step = steps[state.step];
    const filled = number === undefined && state.fill && found.before !== undefined;
    if (filled) [number, step] = [found.before, found.earlier];
    const there = typeof number === "number";
    view.picture = there ? pictures[number] : null;
    view.shown = there && clips.has(number) ? video : image;
    image.hidden = !there || view.shown !== image;
    video.hidden = !there || view.shown !== video;
    view.missing.hidden = there;
    note.classList.toggle("earlier", filled);
    if (steps.length === 0) note.textContent = "";
    else if (filled) note.textContent = `step ${step}, the nearest earlier`;
    else if (there) note.textContent = found.shared ? "at all steps" : `step ${step}`;
    else note.textContent = "missing";
    if (there) {
      const [source, , , pixels] = view.picture;
      const of = steps.length && !found.shared ? `, step ${step}` : "";
      const words = `${side.name}${of}: ${rows[state.row]}`;
      const { shown } = view;
      empty(view, shown);
      if (shown.getAttribute("src") !== source) shown.src = source;
      if (shown === image) image.alt = words;
      else video.setAttribute("aria-label", words);
      shown.className = pixels ? "pixels" : "";
      return;
    }
    empty(view, null);
    view.text.textContent = typeof number === "string" ? `This picture ${number}.` : sentence(found);
    const target = found.earlier ?? found.later;
    view.go.hidden = found.none || typeof number === "string" || target === undefined;
    view.go.textContent = `Go to step ${target}`;
    view.go.onclick = () => change({ step: steps.indexOf(target) });
  }

  /** Gives pictures their size on the screen: whole pixels for what is shown pixel by pixel. */
  function place() {
    const ratios = figures.filter((view) => view.picture).map(({ picture }) => picture[1] / picture[2]);
    const ratio = ratios.length ? Math.min(3, Math.max(...ratios)) : 1;
    at("sides").style.setProperty("--ratio", String(ratio));
    const dense = window.devicePixelRatio || 1;
    for (const { frame, shown, picture } of figures) {
      frame.classList.toggle("zoomed", state.zoom > 1);
      if (!picture) continue;
      const [, width, height, pixels] = picture;
      let scale = Math.min(frame.clientWidth / width, frame.clientHeight / height);
      if (pixels && scale * dense >= 1) scale = Math.floor(scale * dense) / dense;
      shown.style.width = `${width * scale}px`;
      shown.style.height = `${height * scale}px`;
      shown.style.transform = `translate(${state.x * width * scale}px, ${state.y * height * scale}px) scale(${state.zoom})`;
    }
  }

  let playing = "";

  /** Plays what is shown now, unless it was shown before. */
  function play() {
    const views = figures.filter(({ picture, shown, video }) => picture && shown === video);
    const sources = JSON.stringify(views.map(({ picture, side }) => [side.name, pictures.indexOf(picture)]));
    if (!player || sources === playing) return;
    playing = sources;
    player.take(views.map(({ video }) => video));
  }

  function render() {
    figures.forEach(show);
    place();
    play();
    const many = steps.length > 1;
    const name = word[0].toUpperCase() + word.slice(1);
    at("where").textContent = `${name} ${state.row + 1} of ${rows.length}` +
      (steps.length ? `, step ${steps[state.step]} (${state.step + 1} of ${steps.length})` : "");
    at("prompt").textContent = rows[state.row] ?? "";
    at("row").value = String(state.row);
    at("row-back").disabled = state.row === 0;
    at("row-on").disabled = state.row === rows.length - 1;
    at("step").value = String(state.step);
    at("step").setAttribute("aria-valuetext", `step ${steps[state.step]}`);
    at("step").disabled = !many;
    for (const id of ["step-first", "step-back"]) at(id).disabled = state.step === 0;
    for (const id of ["step-last", "step-on"]) at(id).disabled = state.step >= steps.length - 1;
    at("fill").setAttribute("aria-pressed", String(state.fill));
    at("zoom-reset").textContent = `${Math.round(state.zoom * 100)} %`;
    at("zoom-out").disabled = state.zoom === ZOOMS[0];
    at("zoom-in").disabled = state.zoom === ZOOMS.at(-1);
  }

  // -- the state, in the address as well ------------------------------------------------------

  const within = (value, length) => Math.max(0, Math.min(length - 1, value));

  function address() {
    const parts = new URLSearchParams({ [word]: state.row + 1 });
    if (steps.length) parts.set("step", steps[state.step]);
    if (state.zoom !== 1) parts.set("zoom", state.zoom);
    if (state.fill) parts.set("fill", 1);
    return `#${parts}`;
  }

  function change(wanted) {
    Object.assign(state, wanted);
    state.row = within(state.row, rows.length);
    state.step = within(state.step, steps.length);
    const room = (state.zoom - 1) / 2;
    state.x = Math.max(-room, Math.min(room, state.x));
    state.y = Math.max(-room, Math.min(room, state.y));
    render();
    if (location.hash !== address()) location.replace(address());
  }

  function read() {
    const parts = new URLSearchParams(location.hash.slice(1));
    const whole = (name) => (/^\d+$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : null);
    const row = whole(word);
    const step = whole("step");
    const zoom = Number(parts.get("zoom") ?? 1);
    const wanted = { fill: parts.get("fill") === "1", zoom: ZOOMS.includes(zoom) ? zoom : 1 };
    if (row !== null) wanted.row = row - 1;
    // A step that there is not gives the last one before it.
    if (step !== null) wanted.step = steps.filter((each) => each <= step).length - 1;
    change(wanted);
  }

  const zoomBy = (by) => change({ zoom: ZOOMS[within(ZOOMS.indexOf(state.zoom) + by, ZOOMS.length)] });
  const stepBy = (by) => (steps.length ? change({ step: state.step + by }) : change({ row: state.row + by }));
  const rowBy = (by) => change({ row: state.row + by });
  const toEnd = (last) => (steps.length
    ? change({ step: last ? steps.length - 1 : 0 })
    : change({ row: last ? rows.length - 1 : 0 }));

  const KEYS = {
    ArrowLeft: () => stepBy(-1),
    ArrowRight: () => stepBy(1),
    ArrowUp: () => rowBy(-1),
    ArrowDown: () => rowBy(1),
    Home: () => toEnd(false),
    End: () => toEnd(true),
    "+": () => zoomBy(1),
    "=": () => zoomBy(1),
    "-": () => zoomBy(-1),
    "−": () => zoomBy(-1),
    0: () => change({ zoom: 1 }),
    ...(player && {
      " ": () => player.toggle(),
      ",": () => player.stepBy(-1),
      ".": () => player.stepBy(1),
    }),
    f: () => change({ fill: !state.fill }),
    F: () => change({ fill: !state.fill }),
  };

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const action = KEYS[event.key];
    if (!action || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    action();
  });

  const BUTTONS = {
    "row-back": KEYS.ArrowUp,
    "row-on": KEYS.ArrowDown,
    "step-first": KEYS.Home,
    "step-back": KEYS.ArrowLeft,
    "step-on": KEYS.ArrowRight,
    "step-last": KEYS.End,
    "zoom-in": KEYS["+"],
    "zoom-out": KEYS["-"],
    "zoom-reset": KEYS[0],
    fill: KEYS.f,
  };
  for (const [id, action] of Object.entries(BUTTONS)) at(id).addEventListener("click", action);
  at("step").addEventListener("input", (event) => change({ step: Number(event.target.value) }));
  at("row").addEventListener("change", (event) => change({ row: Number(event.target.value) }));
  window.addEventListener("hashchange", () => {
    if (location.hash !== address()) read();
  });
  window.addEventListener("resize", place);

  // -- looking closer, at the same place of all pictures --------------------------------------

  for (const view of figures) {
    const { frame } = view;
    let from = null;
    frame.addEventListener("pointerdown", (event) => {
      if (state.zoom === 1 || event.button !== 0 || event.target.closest("button")) return;
      from = { x: event.clientX, y: event.clientY, left: state.x, top: state.y };
      frame.setPointerCapture(event.pointerId);
      frame.classList.add("moving");
    });
    frame.addEventListener("pointermove", (event) => {
      if (!from) return;
      change({
        x: from.left + (event.clientX - from.x) / (view.shown.offsetWidth || 1),
        y: from.top + (event.clientY - from.y) / (view.shown.offsetHeight || 1),
      });
    });
    for (const end of ["pointerup", "pointercancel"]) {
      frame.addEventListener(end, () => {
        from = null;
        frame.classList.remove("moving");
      });
    }
    frame.addEventListener("dblclick", (event) => {
      if (view.shown.hidden) return;
      if (state.zoom > 1) return change({ zoom: 1 });
      const box = view.shown.getBoundingClientRect();
      const zoom = 3;
      change({
        zoom,
        x: (0.5 - (event.clientX - box.left) / box.width) * (zoom - 1),
        y: (0.5 - (event.clientY - box.top) / box.height) * (zoom - 1),
      });
    });
  }

  // -- what does not change -------------------------------------------------------------------

  function table(element, lines, heads) {
    const head = make("thead");
    const top = make("tr");
    for (const text of ["setting", ...heads]) {
      const cell = make("th", "", text);
      cell.scope = "col";
      top.append(cell);
    }
    head.append(top);
    const body = make("tbody");
    for (const [key, values] of lines) {
      const line = make("tr");
      const cell = make("th", "", key);
      cell.scope = "row";
      line.append(cell, ...values.map((value) => make("td", "", value)));
      body.append(line);
    }
    element.replaceChildren(head, body);
    element.parentElement.hidden = lines.length === 0;
  }

  function settings() {
    const differs = ([, values]) => values.some((value) => value !== values[0]);
    const differing = data.settings.filter(differs);
    const equal = data.settings.filter((line) => !differs(line)).map(([key, values]) => [key, [values[0]]]);
    at("settings").hidden = data.settings.length === 0;
    table(at("differing"), differing, data.runs);
    const several = data.runs.length > 1;
    table(at("equal").querySelector("table"), equal, [several ? "all runs" : data.runs[0]]);
    at("equal").hidden = equal.length === 0;
    at("equal").open = !several;
    at("equal").querySelector("summary").textContent = several
      ? `${differing.length ? "" : "All "}${equal.length} settings are equal` : `${equal.length} settings`;
  }

  at("row").append(...rows.map((text, index) => {
    const option = make("option", "", `${index + 1}. ${text}`);
    option.value = String(index);
    return option;
  }));
  const name = word[0].toUpperCase() + word.slice(1);
  at("row-controls").setAttribute("aria-label", name);
  at("row").setAttribute("aria-label", name);
  for (const [id, side] of [["row-back", "before"], ["row-on", "after"]]) {
    at(id).setAttribute("aria-label", `${name} ${side}`);
    at(id).title = `${name} ${side} (${side === "before" ? "↑" : "↓"})`;
  }
  at("step").max = String(Math.max(0, steps.length - 1));
  at("step-controls").hidden = steps.length === 0;
  const keys = steps.length
    ? [["←", "→"], "steps,", ["↑", "↓"], `${word}s,`, ["Home", "End"], "first and last step,", ["F"], "fill gaps,"]
    : [["←", "→"], `${word}s,`, ["Home", "End"], `first and last ${word},`];
  if (player) keys.push(["space"], "play or pause,", [",", "."], "frames,");
  for (const part of keys) {
    if (typeof part === "string") at("keys").append(` ${part} `);
    else part.forEach((key) => at("keys").append(make("kbd", "", key), " "));
  }
  const columns = sides.length <= 4 ? sides.length : Math.ceil(sides.length / 2);
  at("sides").style.setProperty("--columns", String(columns));
  settings();
  read();
})();
