// The chooser of the home page: the known bugs of a trainer in a release of TRL. The data are in the page.
(function () {
  const form = document.getElementById("chooser");
  if (!form) return;
  const data = JSON.parse(document.getElementById("chooser-data").textContent);
  const [trainer, release] = form.querySelectorAll("select");
  const list = document.getElementById("chooser-bugs");
  const count = document.getElementById("chooser-count");

  const option = (select, value) => select.add(new Option(value, value));
  data.releases.forEach((name) => option(release, name));

  function offerTrainers() {
    const before = trainer.value;
    trainer.replaceChildren();
    Object.keys(data.hit[release.value]).forEach((name) => option(trainer, name));
    if (data.hit[release.value][before]) trainer.value = before;
  }

  function show() {
    const bugs = data.hit[release.value][trainer.value].map((index) => data.bugs[index]);
    const repaired = bugs.filter((bug) => bug.repair !== "none").length;
    count.textContent = bugs.length
      ? `${trainer.value} of TRL ${release.value} may hit ${bugs.length} known bugs; trl_hotfix repairs ${repaired}.`
      : `No bug is known that ${trainer.value} of TRL ${release.value} can hit.`;
    list.replaceChildren(
      ...bugs.map((bug) => {
        const item = document.createElement("li");
        const link = document.createElement("a");
        link.href = bug.page;
        link.textContent = bug.title;
        const note = document.createElement("small");
        note.textContent = ` ${bug.severity}${bug.repair === "none" ? ", no repair here" : ""}`;
        item.append(link, note);
        return item;
      })
    );
  }

  offerTrainers();
  release.addEventListener("change", () => { offerTrainers(); show(); });
  trainer.addEventListener("change", show);
  form.hidden = false;
  show();
})();
