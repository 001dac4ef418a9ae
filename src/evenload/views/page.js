"use strict";
// The page is complete without this: it adds a cursor with values, zooming, and, on a live page, new sections as they come.
let view = [0, 1], drag = null;
const tip = document.body.appendChild(Object.assign(document.createElement("div"), {id: "tip"}));
const clock = s => { s = Math.round(s); const d = Math.floor(s / 86400), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = n => String(n).padStart(2, "0");
  return d ? `${d} d ${two(h % 24)} h` : h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`; };
const label = (info, t, step) => info.began ? new Date((info.began + t) * 1000).toLocaleTimeString("en-GB", step < 60 ? {} : {hour: "2-digit", minute: "2-digit"})
  : step < 1 ? t.toFixed(2) + " s" : clock(t);
const axis = () => { const node = document.querySelector("[data-axis]"); return node ? JSON.parse(node.dataset.axis) : null; };
const place = (box, event) => { const r = box.getBoundingClientRect(); return Math.min(1, Math.max(0, (event.clientX - r.left) / r.width)); };
const valueOf = (row, bin) => { if (row.p) { const n = +row.p.slice(2 * bin, 2 * bin + 2); return n ? n + " %" : null; }
  const value = row.v[bin]; return value === null || value === undefined ? null : value + (row.u ? " " + row.u : ""); };
function zoom(a, b) {
  view = [a, b];
  const info = axis(); if (!info) return;
  for (const svg of document.querySelectorAll(".plot svg")) { const full = info.end / info.width; svg.setAttribute("viewBox", `${a * full} 0 ${(b - a) * full} 100`); }
  const whole = a === 0 && b === 1, span = (b - a) * info.end;
  const button = document.getElementById("unzoom"); if (button) button.style.display = whole ? "none" : "inline-block";
  const steps = [.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  let step = steps.find(s => span / s <= 8) || 172800; while (span / step > 8) step *= 2;
  for (const row of document.querySelectorAll(".plot .x")) {
    if (whole && !row.dataset.redrawn) continue;
    row.dataset.redrawn = "1"; row.replaceChildren();
    const shift = info.began ? (info.began - new Date(info.began * 1000).getTimezoneOffset() * 60) % step : 0;
    for (let t = Math.ceil((a * info.end + shift) / step) * step - shift; t <= b * info.end; t += step) {
      const mark = document.createElement("i"); mark.style.left = 100 * (t / info.end - a) / (b - a) + "%";
      mark.textContent = label(info, t, step); row.append(mark); } }
}
function hide() { tip.style.display = "none"; for (const c of document.querySelectorAll(".cursor,.select")) c.remove(); }
function show(box, event) {
  const info = axis(), part = place(box, event); if (!info) return;
  for (const other of document.querySelectorAll(".box")) {
    let line = other.querySelector(".cursor"); if (!line) { line = document.createElement("div"); line.className = "cursor"; other.append(line); }
    line.style.left = 100 * part + "%";
    if (drag !== null) { let area = other.querySelector(".select"); if (!area) { area = document.createElement("div"); area.className = "select"; other.append(area); }
      area.style.left = 100 * Math.min(drag, part) + "%"; area.style.width = 100 * Math.abs(drag - part) + "%"; } }
  const seconds = (view[0] + part * (view[1] - view[0])) * info.end, bin = Math.floor(seconds / info.width), plot = box.closest(".plot");
  const step = info.steps[Math.min(bin, info.steps.length - 1)];
  tip.replaceChildren();
  const line = (text, bold) => { const node = tip.appendChild(document.createElement(bold ? "b" : "div")); node.textContent = text; if (bold) tip.append(document.createElement("br")); };
  line(label(info, seconds, 1) + (step === null || step === undefined ? "" : ` · step ${step}`), true);
  const caption = plot.querySelector("figcaption"); if (caption.firstChild) line(caption.firstChild.textContent);
  const own = event.target.querySelector ? event.target.querySelector(":scope > title") : null;
  if (own) line(own.textContent);
  const rows = JSON.parse(plot.dataset.series).map(row => [row.n, valueOf(row, bin)]).filter(row => row[1] !== null);
  for (const [name, value] of rows.slice(0, 16)) line(`${name}: ${value}`);
  if (rows.length > 16) line(`and ${rows.length - 16} more`);
  tip.style.display = "block";
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(innerWidth - width - 4, event.clientX + (event.clientX > innerWidth / 2 ? -width - 14 : 14))) + "px";
  tip.style.top = Math.max(4, Math.min(innerHeight - height - 4, event.clientY + 14)) + "px";
}
addEventListener("pointermove", event => { const box = event.target.closest ? event.target.closest(".box") : null; if (box) show(box, event); else if (drag === null) hide(); });
addEventListener("pointerdown", event => { const box = event.target.closest(".box"); if (box && event.pointerType === "mouse" && event.button === 0) { drag = place(box, event); event.preventDefault(); } });
addEventListener("pointerup", event => { if (drag === null) return; const box = event.target.closest ? event.target.closest(".box") : null, from = drag; drag = null;
  if (box) { const to = place(box, event), wide = view[1] - view[0]; if (Math.abs(to - from) > .01) zoom(view[0] + Math.min(from, to) * wide, view[0] + Math.max(from, to) * wide); } hide(); });
addEventListener("dblclick", event => { if (event.target.closest(".box")) zoom(0, 1); });
addEventListener("keydown", event => { if (event.key === "Escape") zoom(0, 1); });
addEventListener("click", event => { if (event.target.id === "unzoom") zoom(0, 1); });
if ("live" in document.body.dataset) {
  const stream = new EventSource("events"), main = document.querySelector("main");
  const lost = is => { let chip = document.getElementById("lost"); if (is && !chip) { chip = document.createElement("p"); chip.id = "lost"; chip.className = "chip bad";
    chip.textContent = "no connection: evenload show has ended, or this machine sleeps"; main.prepend(chip); } else if (!is && chip) chip.remove(); };
  stream.onopen = () => lost(false); stream.onerror = () => lost(true);
  stream.onmessage = event => { lost(false); hide();
    for (const [name, html] of Object.entries(JSON.parse(event.data))) {
      const section = document.getElementById(name); if (!section) continue;
      const open = new Map([...section.querySelectorAll("details[id]")].map(node => [node.id, node.open]));
      section.innerHTML = html;
      for (const [id, state] of open) { const node = document.getElementById(id); if (node) node.open = state; } }
    if (view[0] !== 0 || view[1] !== 1) zoom(view[0], view[1]); };
}
