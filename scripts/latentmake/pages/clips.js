/**
 * Plays clips in step, under one control for all. The longest one leads; the others follow its
 * time, and wait at their last frame where they are shorter. At the end all begin again together.
 */
class Player {
  constructor(fps) {
    this.fps = fps;
    this.playing = true;
    this.videos = [];
    this.turn = 0;
    at("play").addEventListener("click", () => this.toggle());
    at("time").addEventListener("input", (event) => this.scrub(Number(event.target.value)));
    this.label();
    const tick = () => {
      this.follow();
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  get duration() {
    return Math.max(0, ...this.videos.map((video) => video.duration || 0));
  }

  get leader() {
    return this.videos.find((video) => video.duration === this.duration);
  }

  /** Plays these clips from now on, and from where the others stood. */
  async take(videos) {
    const time = this.leader?.currentTime ?? 0;
    for (const video of this.videos) if (!videos.includes(video)) video.pause();
    const turn = ++this.turn;
    this.videos = [];
    const loaded = await Promise.all(videos.map((video) => Player.loaded(video)));
    if (turn !== this.turn) return;
    this.videos = videos.filter((_, index) => loaded[index]);
    at("clip-controls").hidden = videos.length === 0;
    at("time").max = String(this.duration);
    await this.go(time < this.duration ? time : 0);
  }

  /** Waits until a clip can be shown; tells whether it can. */
  static loaded(video) {
    if (video.error) return Promise.resolve(false);
    if (video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA) return Promise.resolve(true);
    return new Promise((resolve) => {
      video.addEventListener("loadeddata", () => resolve(true), { once: true });
      video.addEventListener("error", () => resolve(false), { once: true });
    });
  }

  /** Moves all clips to a time in seconds, and plays on only when all are there. */
  async go(time) {
    const turn = ++this.turn;
    await Promise.all(this.videos.map((video) => {
      video.pause();
      video.playbackRate = 1;
      const place = Math.max(0, Math.min(time, video.duration - 0.5 / this.fps));
      if (Math.abs(video.currentTime - place) < 1e-4) return null;
      return new Promise((resolve) => {
        video.addEventListener("seeked", resolve, { once: true });
        video.currentTime = place;
      });
    }));
    if (turn !== this.turn) return;
    if (this.playing) this.videos.forEach((video) => video.play().catch(() => {}));
    this.tell();
  }

  scrub(time) {
    this.pause();
    this.go(time);
  }

  /** Shows another frame, a number of them away from this one. */
  stepBy(count) {
    if (!this.leader) return;
    const frames = Math.round(this.duration * this.fps);
    const next = Math.floor(this.leader.currentTime * this.fps + 1e-3) + count;
    this.scrub((((next % frames) + frames) % frames + 0.5) / this.fps);
  }

  toggle() {
    if (this.playing) return this.pause();
    this.playing = true;
    this.label();
    const { leader } = this;
    this.go(leader && !leader.ended ? leader.currentTime : 0);
  }

  pause() {
    this.playing = false;
    this.videos.forEach((video) => video.pause());
    this.label();
  }

  label() {
    at("to-play").toggleAttribute("hidden", this.playing);
    at("to-pause").toggleAttribute("hidden", !this.playing);
    at("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  tell() {
    const { leader } = this;
    if (!leader) return;
    const frames = Math.round(this.duration * this.fps);
    const frame = Math.min(frames, Math.floor(leader.currentTime * this.fps + 1e-3) + 1);
    at("time").value = String(leader.currentTime);
    at("frame").textContent = `frame ${frame} of ${frames}`;
  }

  /** Keeps the others within a fraction of a frame of the leader. */
  follow() {
    const { leader } = this;
    if (!this.playing || !leader) return;
    if (leader.ended) {
      this.go(0);
      return;
    }
    if (leader.paused || leader.seeking) return;
    for (const video of this.videos) {
      if (video === leader || video.ended || video.paused || video.seeking) continue;
      const ahead = (video.currentTime - leader.currentTime) * this.fps;
      if (Math.abs(ahead) > 1.5) video.currentTime = leader.currentTime;
      const rate = Math.abs(ahead) < 0.1 ? 1 : ahead > 0 ? 0.9 : 1.1;
      if (video.playbackRate !== rate) video.playbackRate = rate;
    }
    this.tell();
  }
}

/**
 * Plays the clips of those items of a page that are on the screen, or those of its open dialog, and
 * lets keys drive them. Returns a function to call when a dialog has opened, changed or closed.
 */
function playItems(player) {
  const shown = new Set();
  const controls = at("clip-controls");
  const home = controls.parentElement;
  const take = () => {
    const dialog = document.querySelector("dialog[open]");
    (dialog?.querySelector(".top") ?? home).append(controls);
    player.take([...(dialog ?? document).querySelectorAll("video")].filter((video) => dialog || shown.has(video)));
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      for (const video of target.querySelectorAll("video")) {
        if (isIntersecting) shown.add(video);
        else shown.delete(video);
      }
    }
    take();
  });
  document.querySelectorAll(".item").forEach((box) => watch.observe(box));

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !document.querySelector("video")) return;
    const arrows = !document.querySelector("dialog[open]"); // there they have another meaning
    if (event.target.id === "time" && event.key.startsWith("Arrow")) event.target.blur();
    if (event.key === " " && !["BUTTON", "SUMMARY"].includes(event.target.tagName)) player.toggle();
    else if (event.key === "," || (arrows && event.key === "ArrowLeft")) player.stepBy(-1);
    else if (event.key === "." || (arrows && event.key === "ArrowRight")) player.stepBy(1);
    else return;
    event.preventDefault();
  });
  return take;
}
