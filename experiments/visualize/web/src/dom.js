// Elements. Texts become text nodes and nothing else: whatever a prompt or a model
// writes is shown as it is written.

/** Makes an element; `on` has event handlers, other properties are attributes. */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) {
        element.addEventListener(event, handler);
      }
    } else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** Replaces each `{name}` of a text. */
export function filled(text, values) {
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

/** Questions with answers that open. */
export function questions(title, pairs, values = {}) {
  return el(
    "aside", { class: "questions", "aria-label": title }, el("h3", {}, title),
    pairs.map(([question, answer], i) =>
      el("details", { open: i === 0 },
        el("summary", {}, filled(question, values)), el("p", {}, filled(answer, values))),
    ),
  );
}

/** After a click with the pointer the arrow keys are the timeline's again. */
export function leave(event) {
  if (event.detail) event.currentTarget.blur();
}

/** A group of buttons of which one is chosen; `name` is its own on the page. */
export function choice(name, label, options, chosen, onChoose) {
  const id = `choice-${name}`;
  const group = el("div", { class: "choice", role: "radiogroup", id, "aria-labelledby": `${id}-label` });
  const buttons = options.map(([value, text]) =>
    el("button", {
      type: "button", role: "radio", "data-value": value,
      on: {
        click: (event) => { leave(event); mark(value); onChoose(value); },
        keydown: (event) => {
          const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
          if (!step) return;
          event.preventDefault();
          event.stopPropagation();
          const at = options.findIndex(([v]) => v === value);
          const next = (at + step + options.length) % options.length;
          buttons[next].focus();
          buttons[next].click();
        },
      },
    }, text),
  );
  const mark = (value) => {
    for (const button of buttons) {
      const is = button.dataset.value === value;
      button.setAttribute("aria-checked", String(is));
      button.tabIndex = is ? 0 : -1;
    }
  };
  mark(chosen);
  group.append(el("span", { class: "label", id: `${id}-label` }, label), ...buttons);
  return group;
}

/** CSS pixels of a rem, which grows with the screen. */
export function remPixels() {
  return parseFloat(getComputedStyle(document.documentElement).fontSize);
}

/** The width of an element in CSS pixels, and a call when it changes. */
export function watchSize(element, onSize) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    const now = Math.floor(element.clientWidth);
    if (now !== width && now > 0) {
      width = now;
      onSize(now);
    }
  });
  observer.observe(element);
  return () => observer.disconnect();
}
