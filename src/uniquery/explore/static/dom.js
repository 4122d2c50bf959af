// Elements from text nodes only: whatever a file or a class is called, it is shown as text.

/**
 * @param {string} tag
 * @param {Record<string, any>} [properties] attributes; `on…` are listeners, `class` is the class name
 * @param {...(Node | string | number | null | undefined)} children
 * @returns {any}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, properties, children);
  return element;
}

/** The same for SVG. @returns {any} */
export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, properties, children);
  return element;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child != null).map((c) => (c instanceof Node ? c : String(c))));
}

/** A control below its label, and what is at the right of the label. @returns {HTMLElement} */
export function field(label, control, right = null) {
  control.id ||= `control-${++fields}`;
  return h("div", { class: "field" }, h("span", {}, h("label", { for: control.id }, label), right), control);
}
let fields = 0;

/** A labeled slider that shows its value. @returns {HTMLElement} */
export function slider(label, { min, max, step, value, show = (v) => v.toFixed(2), input }) {
  const shown = h("span", { "aria-hidden": "true" });
  const control = h("input", { type: "range", min, max, step, oninput: () => { describe(); input(control.valueAsNumber); } });
  const describe = () => {
    shown.textContent = show(control.valueAsNumber);
    control.setAttribute("aria-valuetext", shown.textContent);
  };
  control.value = String(value);
  describe();
  return field(label, control, shown);
}

/** A labeled select. @param {[string, string][]} options value and text @returns {HTMLElement} */
export function select(label, options, value, change) {
  const control = h("select", { onchange: () => change(control.value) });
  for (const [key, text] of options) control.append(h("option", { value: key, selected: key === String(value) }, text));
  return field(label, control);
}

/** A labeled checkbox. @returns {HTMLLabelElement} */
export function checkbox(label, checked, change) {
  const control = h("input", { type: "checkbox", checked, onchange: () => change(control.checked) });
  return h("label", { class: "check" }, control, label);
}

/** Calls a function once things have been quiet for some milliseconds. */
export function debounced(call, milliseconds) {
  let timer = 0;
  return (...values) => { clearTimeout(timer); timer = window.setTimeout(() => call(...values), milliseconds); };
}

/** A number from 0 to 1 in percent, or n/a. */
export const percent = (value, digits = 1) => (value == null ? "n/a" : `${(100 * value).toFixed(digits)} %`);
