// Unpack the data and show the page. `explorer.set({ layer: 3 })` in the console does what the controls do.

async function start() {
  const data = JSON.parse($("data").textContent);
  const names = Object.keys(data.arrays);
  const unpacked = await Promise.all(names.map((name) => unpack(data.arrays[name])));
  $("app").hidden = false;
  window.explorer = new Page(data, Object.fromEntries(names.map((name, i) => [name, unpacked[i]])));
}

start().catch((error) => {
  $("failure").hidden = false;
  $("failure").textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
