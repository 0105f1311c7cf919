(() => {
  const player = new Player(data.fps);

  function figure({ file, made }, title) {
    const element = make("figure");
    const video = make("video", data.width < 256 ? "pixels" : "");
    video.muted = true;
    video.playsInline = true;
    video.preload = "auto";
    video.src = file;
    video.style.aspectRatio = `${data.width} / ${data.height}`;
    video.setAttribute("aria-label", `${made}: ${title}`);
    element.append(make("figcaption", "", made), video);
    return element;
  }

  for (const { prompt, seed, clips } of data.rows) {
    const box = make("article", "item");
    const head = make("h2", "", `${prompt} `);
    head.append(make("span", "note", `seed ${seed}`));
    const row = make("div", "row");
    row.append(...clips.map((clip) => figure(clip, prompt)));
    box.append(head, row);
    at("rows").append(box);
  }
  at("nothing").hidden = data.rows.length > 0;

  playItems(player);

  const body = make("tbody");
  for (const [name, value] of data.settings) {
    const line = make("tr");
    const cell = make("th", "", name);
    cell.scope = "row";
    line.append(cell, make("td", "", value));
    body.append(line);
  }
  at("used").append(body);
})();
