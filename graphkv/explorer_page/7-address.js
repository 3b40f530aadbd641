// What is chosen, in the address of the page: a link to it shows the same.

class Address {
  /** `allowed` has, for each name of what can be chosen, the values that make sense. */
  constructor(allowed) {
    this.allowed = allowed;
  }

  /** What the address asks for, as far as it makes sense. */
  read() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const found = Object.entries(this.allowed).map(([name, values]) => [
      name,
      values.find((value) => String(value) === asked.get(name)),
    ]);
    return Object.fromEntries(found.filter(([, value]) => value !== undefined));
  }

  /** Write what is chosen, once nothing has changed for a moment: browsers take their time for it. */
  write(chosen) {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      const known = Object.entries(chosen).filter(([, value]) => value !== null);
      history.replaceState(null, "", `#${new URLSearchParams(known)}`);
    }, 300);
  }
}
