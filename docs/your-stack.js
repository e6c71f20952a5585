// The page "your stack": the bugs of the versions that are given. The data are in the page.
(function (page) {
  // A version as numbers to compare: 1.0.0rc1 comes before 1.0.0. Local parts (+cu128) and dev parts count for nothing.
  function parsed(text) {
    const match = /^v?(\d+(?:\.\d+)*)(?:[._-]?(a|b|rc)(\d*))?(?:[.+-].*)?$/.exec(text.trim().toLowerCase());
    if (!match) return null;
    const rank = { a: 0, b: 1, rc: 2 }[match[2]] ?? 3;
    return { release: match[1].split(".").map(Number), rank, number: Number(match[3] || 0) };
  }

  function compared(one, other) {
    for (let part = 0; part < Math.max(one.release.length, other.release.length); part += 1) {
      const difference = (one.release[part] || 0) - (other.release[part] || 0);
      if (difference) return difference;
    }
    return one.rank - other.rank || one.number - other.number;
  }

  function meets(version, specifier) {
    const [, operator, text] = /^(>=|<=|==|!=|>|<)(.+)$/.exec(specifier.trim());
    const limit = parsed(text);
    const order = compared(version, limit);
    // As for pip, 1.0.0rc1 is not in <1.0.0.
    const early = version.rank < 3 && limit.rank === 3 && !compared({ ...version, rank: 3, number: 0 }, limit);
    return {
      ">=": order >= 0, "<=": order <= 0, "==": order === 0, "!=": order !== 0, ">": order > 0, "<": order < 0 && !early,
    }[operator];
  }

  const inRange = (version, range) => range.split(",").every((specifier) => meets(version, specifier));

  // A package without a version is not installed.
  function has(bug, versions) {
    const there = (name, range) => Boolean(versions[name]) && inRange(versions[name], range);
    return bug.trl.some((range) => there("trl", range)) && Object.entries(bug.requires).every(([name, range]) => there(name, range));
  }

  if (!page) {
    module.exports = { parsed, has };
    return;
  }
  const form = page.getElementById("stack");
  if (!form) return;
  const data = JSON.parse(page.getElementById("stack-data").textContent);
  const count = page.getElementById("stack-count");
  const list = page.getElementById("stack-bugs");

  function add(parent, name, text = "", attributes = {}) {
    const element = page.createElement(name);
    element.textContent = text;
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    parent.append(element);
    return element;
  }

  const inputs = data.packages.map((name) => {
    const label = add(page.getElementById("stack-packages"), "label", `${name} `);
    return add(label, "input", "", { name, size: 8, value: data.example[name] || "", placeholder: "not installed" });
  });

  function show() {
    const versions = {};
    const wrong = inputs.filter((input) => input.value.trim() && !parsed(input.value));
    inputs.forEach((input) => { versions[input.name] = input.value.trim() ? parsed(input.value) : null; });
    list.replaceChildren();
    if (wrong.length) {
      count.textContent = `Not a version such as 1.2.3: ${wrong.map((input) => input.name).join(", ")}.`;
      return;
    }
    const bugs = data.bugs.filter((bug) => has(bug, versions));
    const ofLayers = bugs.filter((bug) => bug.layer !== "trl").length;
    const repaired = bugs.filter((bug) => bug.repair !== "none").length;
    count.textContent = versions.trl
      ? `${bugs.length} known bugs: ${bugs.length - ofLayers} of TRL, ${ofLayers} of the layers beneath. trl_hotfix repairs ${repaired}.`
      : "Give a release of TRL.";
    bugs.sort((one, other) => (one.layer === "trl") - (other.layer === "trl"));
    bugs.forEach((bug) => {
      const item = add(list, "li");
      add(item, "a", bug.title, { href: data.up + bug.page });
      const whose = bug.layer === "trl" ? "TRL" : bug.layer;
      add(item, "small", ` ${whose}; ${bug.severity}; ${bug.fixed ? `fixed in ${bug.fixed}` : "no release has the fix"}`);
    });
  }

  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
  form.hidden = false;
})(typeof document === "undefined" ? null : document);
