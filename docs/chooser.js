// The table of the home page: the known bugs of each trainer in each release of TRL, the newest first. The data are in the page.
(function () {
  const form = document.getElementById("chooser");
  if (!form) return;
  const data = JSON.parse(document.getElementById("chooser-data").textContent);
  const filter = form.querySelector("select");
  const table = form.querySelector("table");
  const list = document.getElementById("chooser-bugs");
  const count = document.getElementById("chooser-count");
  const most = Math.max(...data.releases.flatMap((release) => Object.values(data.hit[release]).map((bugs) => bugs.length)));
  const EVERY = "every trainer";
  let chosen = null;

  const minor = (release) => release.split(".").slice(0, 2).join(".");
  const has = (bug) => data.bugs[bug].repair !== "none";

  function add(parent, name, text = "", attributes = {}) {
    const element = document.createElement(name);
    element.textContent = text;
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    parent.append(element);
    return element;
  }

  // Releases of one minor version that follow each other and have the same bugs share a row: "1.14.0-1".
  function rows(trainers) {
    const groups = [];
    data.releases.forEach((release) => {
      const bugs = JSON.stringify(trainers.map((trainer) => data.hit[release][trainer] || null));
      const last = groups[groups.length - 1];
      if (last && last.bugs === bugs && minor(last.newest) === minor(release)) last.oldest = release;
      else groups.push({ newest: release, oldest: release, bugs });
    });
    return groups;
  }

  function label(group) {
    if (group.newest === group.oldest) return group.newest;
    return `${group.oldest}-${group.newest.slice(minor(group.newest).length + 1)}`;
  }

  function draw() {
    const one = filter.value !== EVERY;
    const trainers = one ? [filter.value] : data.trainers;
    form.classList.toggle("one", one);
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    add(head, "th", "TRL", { scope: "col" });
    trainers.forEach((trainer) => add(add(head, "th", "", { scope: "col" }), "span", trainer));
    const body = add(table, "tbody");
    rows(trainers).forEach((group) => {
      if (one && !data.hit[group.newest][trainers[0]]) return;
      const row = add(body, "tr");
      add(row, "th", label(group), { scope: "row" });
      trainers.forEach((trainer) => cell(add(row, "td"), group, trainer));
    });
  }

  function cell(place, group, trainer) {
    const bugs = data.hit[group.newest][trainer];
    if (!bugs) return;
    const repaired = bugs.filter(has).length;
    const known = bugs.length - repaired;
    const words = `${trainer} of TRL ${label(group)}: ${repaired} repaired${known ? `, ${known} known, no repair` : ""}`;
    const shade = repaired ? Math.ceil((4 * repaired) / most) : 0;
    const button = add(place, "button", String(repaired), { type: "button", class: `s${shade}`, title: words, "aria-label": words });
    button.style.setProperty("--share", `${(100 * bugs.length) / most}%`);
    if (known) add(button, "small", `+${known}`);
    button.setAttribute("aria-pressed", String(Boolean(chosen) && chosen.trainer === trainer && chosen.release === group.newest));
    button.addEventListener("click", () => choose(trainer, group.newest, label(group)));
  }

  function choose(trainer, release, name) {
    chosen = { trainer, release };
    const bugs = data.hit[release][trainer].map((bug) => data.bugs[bug]);
    const repaired = bugs.filter((bug) => bug.repair !== "none").length;
    count.textContent = bugs.length
      ? `${trainer} of TRL ${name} may hit ${bugs.length} known bugs; trl_hotfix repairs ${repaired}.`
      : `We know no bug that ${trainer} of TRL ${name} can hit.`;
    list.replaceChildren();
    bugs.forEach((bug) => {
      const item = add(list, "li");
      add(item, "a", bug.title, { href: bug.page });
      add(item, "small", ` ${bug.severity}${bug.repair === "none" ? ", no repair here" : ""}`);
    });
    const top = form.querySelector(".chooser-box").scrollTop;
    draw();
    form.querySelector(".chooser-box").scrollTop = top;
  }

  [EVERY, ...data.trainers].forEach((name) => filter.add(new Option(name, name)));
  filter.addEventListener("change", () => {
    const trainer = filter.value === EVERY ? data.trainers[0] : filter.value;
    const release = data.releases.find((name) => data.hit[name][trainer]);
    choose(trainer, release, release);
  });
  choose(data.trainers[0], data.releases[0], data.releases[0]);
  form.hidden = false;
})();
