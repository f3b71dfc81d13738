// Elements of a page, and what the user has chosen there.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const html = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Sets only what differs, so that a selection or a focus inside survives an update. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes `parent` hold one element for each item, reusing those that it already has. */
function keepRows(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let row = old.get(key);
    old.delete(key);
    if (!row) {
      row = make(item);
      row.dataset.key = key;
    }
    if (row === place) place = place.nextElementSibling;
    else parent.insertBefore(row, place);
    update(row, item);
  }
  old.forEach((row) => row.remove());
}

/** What the user chose (log scale, smoothing, …) outlasts a reload, where storage is allowed. */
const choices = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`sparkdml-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`sparkdml-${name}`, JSON.stringify(value));
    } catch {
      // Private windows and full storage: the choice lasts as long as the page.
    }
  },
};
