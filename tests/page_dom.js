// Runs the script of a page of fluxjax.view in node, with as much of a document as it uses, and prints what it shows.
"use strict";
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const filters = JSON.parse(process.argv[3] ?? "{}");

class Node {
  constructor(tag) { Object.assign(this, {tag, nodes: [], style: {}, value: "", listeners: {}}); }
  append(...nodes) { this.nodes.push(...nodes); }
  replaceChildren(...nodes) { this.nodes = nodes; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  get children() { return this.nodes.filter(node => node instanceof Node); }
  get textContent() { return this.nodes.map(node => (node instanceof Node ? node.textContent : String(node))).join(""); }
  set textContent(text) { this.nodes = [String(text)]; }
  all(tag) { return [...(this.tag === tag ? [this] : []), ...this.children.flatMap(node => node.all(tag))]; }
}
for (const name of ["innerHTML", "outerHTML", "insertAdjacentHTML", "setAttribute"]) {
  Object.defineProperty(Node.prototype, name, {set() { throw new Error(name); }, get() { throw new Error(name); }});
}

const between = (begin, end) => page.slice(page.indexOf(begin) + begin.length, page.indexOf(end, page.indexOf(begin)));
const nodes = Object.fromEntries([...page.matchAll(/ id="(\w+)"/g)].map(([, id]) => [id, new Node(id)]));
nodes.data.textContent = between('<script type="application/json" id="data">', "</script>");
globalThis.document = {
  getElementById: id => nodes[id],
  createElement: tag => new Node(tag),
  write() { throw new Error("write"); },
};
new Function(between("<script>", "</script>"))();

Object.entries(filters).forEach(([id, value]) => { nodes[id].value = value; });
nodes.filters.listeners.input();
const pages = [];
for (;;) {
  pages.push(nodes.list.children.map(row => {
    row.open = true;
    row.listeners.toggle();
    const tokens = row.all("span").filter(span => span.title);
    return {
      text: row.textContent,
      tokens: tokens.map(token => [token.textContent, token.title, token.style.background ?? ""]),
      images: row.all("img").map(image => image.src),
    };
  }));
  if (nodes.next.disabled) break;
  nodes.next.listeners.click();
}
console.log(JSON.stringify({
  title: nodes.title.textContent, notes: nodes.notes.textContent, count: nodes.count.textContent, pages,
  sources: nodes.source.children.map(option => option.value),
}));
