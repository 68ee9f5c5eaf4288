/* Numbers as people read them. */

const counts = new Intl.NumberFormat("en");
const small = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

export const count = (number) => counts.format(number);
export const compact = (number) => (number < 100000 ? counts.format(number) : short.format(number));
/** A measured value: three digits tell enough. */
export const measured = (number) => (number >= 1000 ? counts.format(Math.round(number)) : small.format(number));
/** Something a second: a mean that dies away is nothing in the end. */
export const rate = (number) => (number < 0.05 ? "0" : number < 100 ? tenths.format(number) : counts.format(Math.round(number)));
export const percent = (share) => `${share > 0 && share < 0.01 ? "<1" : share < 1 && share > 0.99 ? ">99" : Math.round(share * 100)} %`;
export const duration = (ms) => (ms < 1000 ? `${measured(Math.round(ms))} ms` : `${measured(ms / 1000)} s`);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
