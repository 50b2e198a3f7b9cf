// The self-contained page of `overt judge`.
import { JudgeView } from "./judge.js";

const judged = new JudgeView(document.getElementById("overt"), JSON.parse(document.getElementById("overt-index").textContent));
globalThis.overt = { state: () => judged.state, select: (changes) => judged.select(changes), settled: async () => {} };
