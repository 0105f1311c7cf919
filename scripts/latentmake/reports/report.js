(() => {
  const SVG = "http://www.w3.org/2000/svg";

  // -- texts ------------------------------------------------------------------------------------

  const whole = (number) => number.toLocaleString("en");
  const digits = (number) => (number === null || number === undefined ? "–" : Number(number.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
  const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

  function bytes(size) {
    for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]]) {
      if (size >= factor) return `${(size / factor).toFixed(1)} ${unit}`;
    }
    return `${(size / 1e3).toFixed(1)} kB`;
  }

  function time(seconds) {
    if (seconds === null) return "–";
    const date = new Date(seconds * 1000);
    const two = (number) => String(number).padStart(2, "0");
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
  }

  function duration(seconds) {
    if (seconds < 60) return `${seconds.toPrecision(2)} s`.replace("e+1", "0");
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  const reasons = (stale) => Object.entries(stale).map(([reason, count]) => `${whole(count)} ${reason}`).join(", ");
  const counted = (counts) => Object.entries(counts).map(([name, count]) => `${name}: ${whole(count)}`);

  // -- elements ---------------------------------------------------------------------------------

  const within = (section, selector) => at(section).querySelector(selector);
  const say = (section, text) => { within(section, ".empty").textContent = text; };

  function draw(tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Cells are texts, lists of lines, or elements; heads with a > belong to columns of numbers.
  function table(element, heads, lines) {
    const isNumber = heads.map((head) => head.startsWith(">"));
    const cell = (tag, value, index) => {
      const made = make(tag, isNumber[index] ? "number" : "");
      if (Array.isArray(value)) for (const line of value) made.append(make("div", "", line));
      else made.append(value);
      return made;
    };
    const top = make("tr");
    heads.forEach((head, index) => {
      const made = cell("th", head.replace(">", ""), index);
      made.scope = "col";
      top.append(made);
    });
    const head = make("thead");
    head.append(top);
    const body = make("tbody");
    for (const line of lines) {
      const row = make("tr");
      line.forEach((value, index) => {
        const made = cell(index ? "td" : "th", value, index);
        made.dataset.head = heads[index].replace(">", ""); // beside it on a phone
        row.append(made);
      });
      body.append(row);
    }
    element.replaceChildren(head, body);
  }

  // -- summary ----------------------------------------------------------------------------------

  const sum = (rows, pick) => rows.reduce((total, row) => total + pick(row), 0);
  const stale = (row) => sum(Object.values(row.stale), (count) => count);

  function summary() {
    const missing = sum(data.caches, stale);
    const facts = [
      ["Run", data.run],
      ["Model", data.provenance.model],
      ["Datasets", Object.keys(data.provenance.datasets).join(", ")],
      ["Cache files", `${whole(sum(data.caches, (row) => row.files))}, ${bytes(sum(data.caches, (row) => row.bytes))}`],
      ["State", missing ? `${plural(missing, "target")} stale` : "all fresh"],
      ["Written", time(data.planned)],
    ];
    for (const [name, value] of facts) {
      const fact = make("div");
      const word = name === "State" ? (missing ? "warn" : "good") : "";
      fact.append(make("dt", "", name), make("dd", word, value));
      at("summary").append(fact);
    }
  }

  // -- resolutions and buckets ------------------------------------------------------------------

  const SIDE = 30; // pixels of a bucket's outline

  function bucket([width, height, frames, count], most, longest) {
    const row = make("div", "bucket");
    const shape = make("span", "shape");
    shape.style.width = `${Math.max(4, (SIDE * width) / longest)}px`;
    shape.style.height = `${Math.max(4, (SIDE * height) / longest)}px`;
    const bar = make("span", "bar");
    bar.style.width = `${(100 * count) / most}%`;
    const name = `${width} × ${height}${frames > 1 ? ` × ${frames}` : ""}`;
    row.append(shape, make("span", "", name), bar, make("span", "number", whole(count)));
    return row;
  }

  function buckets() {
    const shown = data.buckets.filter((part) => part.sizes.length);
    if (!shown.length) return say("buckets", "No latents yet.");
    const units = [...new Set(shown.map((part) => (part.factor > 1 ? "pixels" : "latents")))].join(" and ");
    const clips = shown.some((part) => part.sizes.some((size) => size[2] > 1));
    say("buckets", `Sizes as they train, in ${units}: width × height${clips ? " × frames of latents" : ""}, and how many items have each.`);
    for (const part of shown) {
      const box = make("div");
      const most = Math.max(...part.sizes.map((size) => size[3]));
      const longest = Math.max(...part.sizes.map((size) => Math.max(size[0], size[1])));
      const title = make("h3", "", part.dataset);
      title.append(make("span", "", `  ${part.part}: ${plural(part.sizes.length, "bucket")}, ${plural(sum(part.sizes, (size) => size[3]), "item")}`));
      box.append(title, ...part.sizes.map((size) => bucket(size, most, longest)));
      within("buckets", ".grid").append(box);
    }
  }

  // -- caches -----------------------------------------------------------------------------------

  function caches() {
    const made = data.caches.filter((row) => row.files).length;
    if (!made) say("caches", "Nothing is encoded yet.");
    table(within("caches", "table"), ["dataset", "part", ">fresh", "stale", ">orphaned", ">files", ">size", "written first", "written last"],
      data.caches.map((row) => [row.dataset, row.part, whole(row.fresh), reasons(row.stale) || "–", whole(row.orphans),
        whole(row.files), bytes(row.bytes), time(row.first), time(row.last)]));
  }

  // -- training ---------------------------------------------------------------------------------

  function curve({ name, steps, values, average }) {
    const [width, height, left, bottom, top, right] = [420, 190, 56, 30, 10, 12];
    const finite = [...values, ...(average || [])].filter((value) => value !== null);
    const box = make("div");
    box.append(make("h3", "", name));
    if (!finite.length) {
      box.append(make("p", "empty", "No finite value."));
      return box;
    }
    let [low, high] = [Math.min(...finite), Math.max(...finite)];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const [first, last] = [steps[0], steps[steps.length - 1]];
    const x = (step) => left + ((step - first) / (last - first || 1)) * (width - left - right);
    const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${name}: from ${digits(finite[0])} to ${digits(finite[finite.length - 1])} over ${last} steps` });
    svg.append(draw("path", { class: "frame", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
    for (const value of [low, (low + high) / 2, high]) {
      svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(Number(value.toPrecision(3)))));
    }
    for (const [step, anchor] of [[first, "start"], [last, "end"]]) {
      svg.append(draw("text", { x: x(step), y: height - bottom + 16, "text-anchor": anchor }, whole(step)));
    }
    svg.append(draw("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "steps"));
    const line = (points, kind) => {
      const known = steps.map((step, index) => [step, points[index]]).filter(([, value]) => value !== null);
      if (known.length === 1) svg.append(draw("circle", { class: kind, cx: x(known[0][0]), cy: y(known[0][1]), r: 3 }));
      else svg.append(draw("polyline", { class: kind, points: known.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
    };
    line(values, average ? "raw faint" : "raw");
    if (average) line(average, "mean");
    box.append(svg);
    return box;
  }

  function samples({ prompts, steps, pictures, total }) {
    const element = make("table");
    table(element, ["", ...prompts], steps.map((step, row) => [`step ${whole(step)}`, ...pictures[row].map((picture, column) => {
      if (picture === null) return "–";
      const image = make("img", picture.pixels ? "pixels" : "");
      image.src = picture.source;
      image.alt = `${prompts[column]}, step ${step}`;
      return image;
    })]));
    const box = make("div", "scroll");
    box.append(element);
    const note = steps.length < total[0] || prompts.length < total[1]
      ? `${steps.length} of ${total[0]} steps and ${prompts.length} of ${plural(total[1], "prompt")}; latentmake compare ${data.run} shows all.` : "";
    within("training", ".samples").append(make("h3", "", "Sample pictures"), make("p", "empty", note), box);
  }

  function training() {
    const found = data.training;
    if (!found) return say("training", data.provenance.trainer ? "Not trained yet." : "The run has no trainer.");
    const { steps, seconds, loss_start: before, loss_end: after } = found.facts;
    const facts = [];
    if (steps) facts.push(plural(steps, "step"));
    if (seconds) facts.push(duration(seconds));
    if (after !== undefined && before !== undefined) facts.push(`loss ${digits(before)} → ${digits(after)}`);
    within("training", ".facts").textContent = facts.join(" · ");
    within("training", ".curves").append(...found.curves.map(curve));
    if (found.samples) samples(found.samples);
    else say("training", "No sample pictures of the present weights.");
  }

  // -- throughput and builds --------------------------------------------------------------------

  function speed() {
    const lines = data.speeds.map(({ work, speed: rate, words }) => [work.replace(" ", " of "), `${digits(rate)} targets/s`, words || "–", "average of past jobs"]);
    for (const build of [...data.history].reverse()) {
      for (const [work, [count, seconds, words]] of Object.entries(build.work)) {
        if (count && seconds) lines.push([work.replace(" ", " of "), `${digits(count / seconds)} targets/s`, words || "–", `${time(build.began)}: ${plural(count, "target")} in ${duration(seconds)}`]);
      }
    }
    const { steps, seconds } = data.training?.facts ?? {};
    if (steps && seconds) lines.unshift(["training", `${digits(steps / seconds)} steps/s`, "–", `${plural(steps, "step")} in ${duration(seconds)}`]);
    if (!lines.length) return say("speed", "No job has encoded anything yet.");
    table(within("speed", "table"), ["work", ">speed", "bottleneck", "measured"], lines.slice(0, 50));
  }

  function history() {
    if (!data.history.length) return say("history", "No build is noted yet.");
    table(within("history", "table"), ["began", ">took", "targets", "result", "made", "how", "versions"],
      [...data.history].reverse().map((build) => [
        make("span", "time", time(build.began)), duration(build.seconds), build.targets.join(" ") || "all",
        make("span", build.succeeded ? "good" : "failed", build.succeeded ? "done" : "failed"),
        [...counted(build.made), ...build.results], counted(build.ways),
        Object.entries(build.versions).map(([name, version]) => `${name} ${version}`).join(", ")]));
  }

  // -- provenance -------------------------------------------------------------------------------

  function part(name, digest, values) {
    const details = make("details");
    const title = make("summary", "", name);
    if (digest) title.append(" ", make("code", "", digest));
    details.append(title, make("pre", "", JSON.stringify(values, null, 2)));
    within("provenance", ".parts").append(details);
  }

  function provenance() {
    const { recipes, datasets, trainer, versions } = data.provenance;
    within("provenance", ".parts").append(make("p", "facts", Object.entries(versions).map((each) => each.join(" ")).join(" · ")));
    for (const each of recipes) part(`Recipe: ${each.name}`, each.digest, each.recipe);
    for (const [name, settings] of Object.entries(datasets)) part(`Dataset ${name}`, "", settings);
    if (trainer) part(`Trainer ${trainer.kind}`, "", trainer);
  }

  summary();
  buckets();
  caches();
  training();
  speed();
  history();
  provenance();
  if (!data.contact.total) say("items", "No item.");
  showItems(data.contact);
  for (const section of document.querySelectorAll("main > section")) {
    const link = make("a", "", section.querySelector("h2").textContent);
    link.href = `#${section.id}`;
    at("sections").append(link);
  }
})();
