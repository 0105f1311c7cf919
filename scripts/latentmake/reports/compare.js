(() => {
  const { sides, rows, steps, pictures } = data;
  const clips = new Set(data.clips);
  const player = clips.size ? new Player(data.fps) : null;
  let playing = [];
  const state = { row: 0, step: Math.max(0, steps.length - 1) };

  const views = sides.map((side) => {
    const figure = make("figure");
    const caption = make("figcaption");
    const view = { side, note: make("span", "note"), frame: make("div", "frame") };
    caption.append(make("span", "name", side.name), view.note);
    figure.append(caption, view.frame);
    at("sides").append(figure);
    return view;
  });

  /** Shows a side's picture at the state's row and step, or says why there is none. */
  function show(view) {
    const cells = view.side.cells[state.row];
    const step = steps[state.step];
    const found = cells[step] ?? cells["*"];
    const there = typeof found === "number";
    const when = cells[step] === undefined ? "at all steps" : `step ${step}`;
    view.note.textContent = !there ? "missing" : steps.length ? when : "";
    if (there && view.shown === found) return;
    view.shown = found;
    if (!there) {
      const words = found ? `This picture ${found}.` : "No picture of this prompt at this step.";
      return view.frame.replaceChildren(make("p", "missing", words));
    }
    const [source, width, height, pixels] = pictures[found];
    const element = make(clips.has(found) ? "video" : "img", pixels ? "pixels" : "");
    Object.assign(element, { src: source, width, height, muted: true, playsInline: true });
    view.frame.replaceChildren(element);
  }

  function change(wanted) {
    const within = (value, list) => Math.max(0, Math.min(list.length - 1, value));
    state.row = within(wanted.row ?? state.row, rows);
    state.step = within(wanted.step ?? state.step, steps);
    views.forEach(show);
    for (const { side, note, frame } of views) {
      const words = `${side.name}, ${note.textContent}: ${rows[state.row]}`;
      frame.firstChild.setAttribute(frame.firstChild.tagName === "IMG" ? "alt" : "aria-label", words);
    }
    const shown = steps.length ? `, step ${steps[state.step]}` : "";
    at("where").textContent = `Prompt ${state.row + 1} of ${rows.length}${shown}`;
    at("prompt").textContent = rows[state.row];
    at("row").value = String(state.row);
    at("step").value = String(state.step);
    at("step").setAttribute("aria-valuetext", String(steps[state.step]));
    const videos = [...document.querySelectorAll("video")];
    if (player && (videos.length !== playing.length || videos.some((video) => !playing.includes(video)))) {
      playing = videos;
      player.take(videos);
    }
    if (location.hash !== address()) location.replace(address());
  }

  // The address keeps what is shown.
  const address = () => `#prompt=${state.row + 1}${steps.length ? `&step=${steps[state.step]}` : ""}`;

  function read() {
    const parts = new URLSearchParams(location.hash.slice(1));
    const whole = (name) => (/^\d+$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : undefined);
    const step = whole("step");
    change({
      row: whole("prompt") === undefined ? undefined : whole("prompt") - 1,
      // A step that there is not gives the last one before it.
      step: step === undefined ? undefined : steps.filter((each) => each <= step).length - 1,
    });
  }

  const along = (by) => (steps.length ? change({ step: state.step + by }) : change({ row: state.row + by }));
  const KEYS = {
    ArrowLeft: () => along(-1),
    ArrowRight: () => along(1),
    Home: () => along(-Infinity),
    End: () => along(Infinity),
    ArrowUp: () => change({ row: state.row - 1 }),
    ArrowDown: () => change({ row: state.row + 1 }),
    ...(player && {
      " ": () => player.toggle(),
      ",": () => player.stepBy(-1),
      ".": () => player.stepBy(1),
    }),
  };
  document.addEventListener("keydown", (event) => {
    const action = KEYS[event.key];
    if (!action || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === " " && event.target.tagName === "BUTTON") return;
    event.preventDefault();
    action();
  });
  at("step").addEventListener("input", (event) => change({ step: Number(event.target.value) }));
  at("row").addEventListener("change", (event) => change({ row: Number(event.target.value) }));
  window.addEventListener("hashchange", read);

  // What does not change: prompts, and the settings of the runs.
  at("row").append(...rows.map((text, index) => new Option(`${index + 1}. ${text}`, String(index))));
  at("step").max = String(Math.max(0, steps.length - 1));
  at("steps").hidden = steps.length === 0;
  const lines = data.settings.map(([key, values]) => [key, ...values]);
  const equal = lines.filter(([, first, ...others]) => others.every((value) => value === first));
  const differing = lines.filter((line) => !equal.includes(line));
  at("differing").append(table(["setting", ...sides.map((side) => side.name)], differing));
  at("differing").hidden = !differing.length;
  at("equal").append(table(["setting", "value"], equal.map((line) => line.slice(0, 2))));
  at("equal").open = sides.length === 1;
  at("equal").querySelector("summary").textContent = `${equal.length} settings are equal`;
  read();
})();
