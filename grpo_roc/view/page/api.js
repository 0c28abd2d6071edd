// Asks the viewer's server. Paths are relative to the page, and nothing else is ever fetched.

export async function ask(path, query = {}) {
  const wanted = Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const response = await fetch(`${path}?${new URLSearchParams(wanted)}`, { redirect: "error" });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { status: response.status });
  return answer;
}

/** Returns a function that runs `act`, but drops its result when it was called again meanwhile. */
export function newest(act, show) {
  let last = 0;
  return async (...given) => {
    const number = ++last;
    const found = await act(...given);
    if (number === last) show(found, ...given);
  };
}
