// The contact sheet: items with their thumbnails, captions and targets.
function showItems(contact) {
  const PAGE = 24; // items
  const SCALE = 2; // pixels of a canvas for one of a thumbnail: crops are drawn as fine lines
  const PIXELS = 128; // smaller pictures are shown pixel by pixel
  const COLOURS = ["#ffd33d", "#3ddcff", "#ff7ad9", "#8dff6a"]; // of crops, by resolution
  const KINDS = {
    "All items": () => true,
    "With a caption that is cut": (item) => item.cut !== undefined,
    "Near-duplicates": (item) => item.like.length > 0,
    "With decoded latents": (item) => item.targets.some((target) => target.decoded),
    "Faulty": (item) => item.fault !== undefined,
  };
  const lowest = (item) => Math.min(...item.targets.map((target) => target.psnr ?? Infinity));
  const tokens = (item) => Math.max(0, ...Object.values(item.tokens).map(([count]) => count));
  const pixels = (item) => (item.width ?? 0) * (item.height ?? 0);
  const ORDERS = {
    "As listed": null,
    "Lowest PSNR first": (a, b) => lowest(a) - lowest(b),
    "Longest caption first": (a, b) => tokens(b) - tokens(a),
    "Smallest image first": (a, b) => pixels(a) - pixels(b),
  };
  const state = { dataset: "", only: "All items", order: "As listed", words: "" };
  const datasets = [...new Set(contact.items.map((item) => item.dataset))];
  const several = datasets.length > 1;
  const resolutions = [...new Set(contact.items.flatMap((item) => item.targets.map((target) => target.resolution)))];
  const colour = (resolution) => COLOURS[resolutions.indexOf(resolution) % COLOURS.length];

  // -- an item ----------------------------------------------------------------------------------

  const images = new Map();
  function sheet(number) {
    if (!images.has(number)) {
      const image = new Image();
      image.src = contact.sheets[number];
      images.set(number, image.decode().then(() => image));
    }
    return images.get(number);
  }

  function thumbnail(item) {
    const [number, x, y, width, height] = item.thumbnail;
    const canvas = make("canvas");
    [canvas.width, canvas.height] = [width * SCALE, height * SCALE];
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${item.stem}, with what each resolution keeps of it`);
    sheet(number).then((image) => {
      const pen = canvas.getContext("2d");
      const boxes = item.targets.flatMap(({ crop, resolution }) => {
        if (!crop) return [];
        const [left, top, right, bottom] = crop.map((share, side) => share * (side % 2 ? canvas.height : canvas.width));
        return [[colour(resolution), left, top, right - left, bottom - top]];
      });
      const paint = () => pen.drawImage(image, x, y, width, height, 0, 0, canvas.width, canvas.height);
      pen.imageSmoothingQuality = "high";
      paint();
      if (boxes.length) {
        pen.fillStyle = "#0009"; // what no resolution keeps is dark
        pen.fillRect(0, 0, canvas.width, canvas.height);
      }
      for (const [, ...box] of boxes) {
        pen.save();
        pen.beginPath();
        pen.rect(...box);
        pen.clip();
        paint();
        pen.restore();
      }
      boxes.forEach(([style, left, top, across, down], index) => {
        const inset = 1 + 4 * index; // crops that are the same stay apart
        pen.strokeStyle = style;
        pen.lineWidth = 2;
        pen.strokeRect(left + inset, top + inset, across - 2 * inset, down - 2 * inset);
      });
      canvas.dataset.drawn = "true";
    });
    return canvas;
  }

  function view(source, title) {
    const figure = make("figure");
    const image = make("img");
    image.addEventListener("load", () => {
      if (image.naturalWidth <= PIXELS) image.className = "pixels";
    });
    image.src = source;
    image.alt = title;
    figure.append(image, make("figcaption", "", title));
    return figure;
  }

  function target(found) {
    const element = make("div", "target");
    const line = make("p");
    if (found.crop) {
      const mark = make("i");
      mark.style.borderColor = colour(found.resolution);
      line.append(mark);
    }
    const size = found.size ? `${found.size[0]} × ${found.size[1]}` : "";
    line.append(make("b", "", found.resolution), size && ` → ${size}`);
    if (found.psnr) line.append(`, ${found.psnr.toFixed(1)} dB`);
    if (found.note) line.append(`: ${found.note}`);
    element.append(line);
    if (found.decoded) {
      if (found.original) element.append(view(found.original, "before the VAE"));
      element.append(view(found.decoded, "decoded latents"));
    }
    return element;
  }

  function badges(item) {
    const line = make("p");
    for (const [encoder, [count, limit]] of Object.entries(item.tokens)) {
      const over = limit !== null && count > limit;
      const text = `${count}${limit === null ? "" : ` of ${limit}`} tokens`;
      const badge = make("span", over ? "badge over" : "badge", Object.keys(item.tokens).length > 1 ? `${encoder}: ${text}` : text);
      badge.title = encoder;
      line.append(badge);
    }
    for (const [dataset, stem, distance] of item.like) {
      const like = make("button", "like", `≈ ${several ? `${dataset}/` : ""}${stem}`);
      like.type = "button";
      like.title = distance ? `${distance} bits of the images' hashes differ` : "the images' hashes are equal";
      like.addEventListener("click", () => change({ dataset: "", only: "All items", words: stem }));
      line.append(like, " ");
    }
    return line;
  }

  function card(item) {
    const element = make("article", "item");
    const name = make("h3", "", item.stem);
    const size = item.width ? `${item.width} × ${item.height}` : "";
    name.append(make("span", "", `  ${[several ? item.dataset : "", size].filter(Boolean).join(", ")}`));
    name.title = item.path;
    element.append(name, item.thumbnail ? thumbnail(item) : make("div", "none", "no picture"));
    if (item.fault) element.append(make("p", "fault", item.fault));
    element.append(make("p", item.caption ? "text" : "text empty", item.caption || "(the empty caption)"));
    for (const [encoder, text] of Object.entries(item.cut ?? {})) {
      const line = make("p", "", `${encoder} does not see: `);
      line.append(make("del", "", text));
      element.append(line);
    }
    element.append(badges(item), ...item.targets.map(target));
    return element;
  }

  // -- items to show ----------------------------------------------------------------------------

  function wanted() {
    const words = state.words.toLowerCase();
    const found = contact.items.filter((item) =>
      (!state.dataset || item.dataset === state.dataset) && KINDS[state.only](item)
      && (!words || item.stem.toLowerCase().includes(words) || item.caption.toLowerCase().includes(words)));
    return ORDERS[state.order] ? found.sort(ORDERS[state.order]) : found;
  }

  const show = showPages(at("sheet"), PAGE, wanted, card, (count) => {
    at("status").textContent = `${count} of ${contact.total} items.`;
    for (const [name, value] of Object.entries(state)) at(name).value = value;
  });

  function change(values) {
    Object.assign(state, values);
    show();
  }

  function choose(name, values) {
    for (const [value, text] of values) {
      const option = make("option", "", text);
      option.value = value;
      at(name).append(option);
    }
    at(name).addEventListener("change", (event) => change({ [name]: event.target.value }));
  }

  const same = (names) => names.map((name) => [name, name]);
  choose("dataset", [["", "All datasets"], ...same(datasets)]);
  at("dataset").parentElement.hidden = !several;
  choose("only", same(Object.keys(KINDS).filter((name) => contact.items.some(KINDS[name]))));
  choose("order", same(Object.keys(ORDERS)));
  at("words").addEventListener("input", (event) => change({ words: event.target.value }));

  showEncoders(contact.encoders);
  document.querySelector(".notes").append(...contact.notes.map((note) => make("li", "", note)));
  if (contact.skipped.length) {
    at("skipped").hidden = false;
    at("skipped").querySelector("summary").textContent = `Skipped: ${contact.skipped.length}`;
    at("skipped").querySelector("ul").append(...contact.skipped.map(({ path, why }) => make("li", "", `${path}: ${why}`)));
  }
  at("sheet-controls").hidden = !contact.items.length;
  if (contact.items.length) show();
}
