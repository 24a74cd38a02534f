// The list of sections beside the page, and links that open what they lead to.
for (const section of document.querySelectorAll("main > section[id], main > details[id]")) {
  const title = section.querySelector("h2, summary");
  if (!title) continue;
  const link = Object.assign(document.createElement("a"), { href: `#${section.id}`, textContent: title.textContent });
  const item = document.createElement("li");
  item.append(link);
  document.getElementById("contents").append(item);
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  if (target.tagName !== "MAIN") target.scrollIntoView();
}

addEventListener("hashchange", openTarget);
openTarget();
