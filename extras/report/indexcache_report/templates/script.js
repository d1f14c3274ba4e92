// Controls of the section that frontier.html makes. What they show was computed before: here it is only looked up.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("frontier-data").textContent);
  const byId = (id) => document.getElementById(id);
  const allowance = byId("allowance"), slider = byId("context"), detail = byId("detail");
  const svg = document.querySelector("#frontier svg");
  const marks = data.names.map((_, number) => byId(`frontier-${number}-mark`));
  const first = data.contexts.length - 1; // the figures were drawn at the longest context
  let current = null;

  const context = () => (slider ? Number(slider.value) : first);

  function moveCharts() {
    for (const chart of data.charts) {
      const limit = chart.limits[allowance.value], from = chart.limits[allowance.dataset.first];
      byId(`${chart.name}-limit`).setAttribute("transform", `translate(0 ${limit - from})`);
      const band = byId(`${chart.name}-band`).querySelector("path").getBBox();
      const bottom = band.y + band.height;
      byId(`${chart.name}-band`).setAttribute(
        "transform", `translate(0 ${bottom}) scale(1 ${(bottom - limit) / band.height}) translate(0 ${-bottom})`);
      if (chart.line.length) byId(`${chart.name}-line`).querySelector("path").setAttribute("d", chart.line[context()]);
      chart.x[first].forEach((start, number) => {
        const place = chart.x[context()][number];
        for (const part of ["mark", "loss", "name", "speed"]) {
          const group = byId(`${chart.name}-${number}-${part}`);
          if (!group) continue;
          group.classList.toggle("unknown", place === null);
          if (place === null) continue;
          group.setAttribute("transform", `translate(${place[1] - start[1]} 0)`);
          if (part !== "speed") continue;
          const path = group.querySelector("path"), height = path.getBBox().y;
          const shift = place[1] - start[1];
          path.setAttribute("d", `M ${place[0] - shift} ${height} L ${place[2] - shift} ${height}`);
        }
      });
    }
  }

  function update() {
    const pick = data.picks[allowance.value][context()];
    byId("key-pick").hidden = pick === null;
    byId("advice").innerHTML = data.advice[allowance.value][context()];
    if (slider) {
      slider.setAttribute("aria-valuetext", data.contexts[context()]);
      document.querySelector("output[for=context]").value = data.contexts[context()];
    }
    moveCharts();
    for (const chart of data.charts)
      for (const part of ["mark", "name"])
        data.names.forEach((_, number) =>
          byId(`${chart.name}-${number}-${part}`)?.classList.toggle("pick", number === pick));
    for (const place of document.querySelectorAll("[data-speed]"))
      place.textContent = data.speeds[context()][place.dataset.speed];
    for (const tag of document.querySelectorAll("[data-within]")) {
      const within = data.within[allowance.value][tag.dataset.within];
      tag.textContent = within ? "within the limit" : "loses too much";
      tag.classList.toggle("beyond", !within);
    }
    marks.forEach((mark, number) =>
      mark?.setAttribute("aria-label", `${data.names[number]}, speed ${data.speeds[context()][number]}`));
    show(pick ?? 0);
  }

  function show(number) {
    current = number;
    const card = byId(`pattern-${number}`).cloneNode(true);
    card.removeAttribute("id");
    detail.replaceChildren(card);
    for (const chart of data.charts)
      data.names.forEach((_, other) =>
        byId(`${chart.name}-${other}-mark`)?.classList.toggle("shown", other === number));
    marks.forEach((mark, other) => {
      mark?.setAttribute("tabindex", other === number ? "0" : "-1");
      mark?.setAttribute("aria-selected", String(other === number));
    });
  }

  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = data.charts[0].x[context()];
    const order = marks.map((_, number) => number).filter((number) => marks[number] && at[number]);
    order.sort((a, b) => at[a][1] - at[b][1] || a - b);
    const next = order[(order.indexOf(current) + step + order.length) % order.length];
    show(next);
    marks[next].focus();
  }

  svg.setAttribute("role", "listbox");
  svg.setAttribute("aria-label", "Patterns, by speed");
  marks.forEach((mark, number) => {
    if (!mark) return;
    mark.setAttribute("role", "option");
    mark.addEventListener("focus", () => show(number));
  });
  for (const chart of data.charts)
    data.names.forEach((_, number) =>
      byId(`${chart.name}-${number}-mark`)?.addEventListener("pointerenter", () => show(number)));
  svg.addEventListener("keydown", move);
  allowance.dataset.first = allowance.value;
  allowance.addEventListener("change", update);
  slider?.addEventListener("input", update);
  byId("choices").addEventListener("submit", (event) => event.preventDefault());
  byId("choices").hidden = detail.hidden = false;
  update();
})();
