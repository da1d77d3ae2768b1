"""Patterns of the JSON Schema formats that minillm enforces. Other formats are annotations without effect."""

from __future__ import annotations

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # many libraries have no year 0
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_CLOCK})"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_REST = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|%[0-9a-fA-F]{2})*"
_LITERAL = r"[^\x00-\x20\"'<>\\^`{|}%]|%[0-9a-fA-F]{2}"
_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9a-fA-F]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9a-fA-F]{2}))*(?::[1-9][0-9]{0,3}|\*)?"
_ATOM = (
    r"(?:[^\\()\[\]{}*+?|^$./]|\\[dDwWsSnrtfv\\()\[\]{}*+?|^$./-]|\.|\[\^?(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9|\\[dws.-])+\])"
)
_PIECE = rf"(?:{_ATOM}(?:[*+?]|\{{[0-9]{{1,2}}\}})?)"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{1,7}}:", f":(?:(?::{_GROUP}){{1,7}}|:)"]
    + [f"(?:{_GROUP}:){{{before}}}(?::{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)]
)
_LABEL = "@(?:~{0,2}@|~(?:@~|-@)~{0,58}@)?"  # no "--" at the third character, which would introduce Punycode
_LABEL = _LABEL.replace("~", "[a-zA-Z0-9-]").replace("@", "[a-zA-Z0-9]")
_FOREIGN = r"[\u00e0-\u00f6\u00f8-\u00ff\u0430-\u044f\u4e00-\u9fa5\uac00-\ud7a3]{1,15}"  # international letters
_ANY_LABEL = f"(?:{_LABEL}|{_FOREIGN})"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_WORD = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_PART = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_AFTER = {"Y": "(?:[0-9]+M(?:[0-9]+D)?)?", "M": "(?:[0-9]+D)?", "D": ""}
_DAYS = "|".join(f"[0-9]+{unit}{rest}" for unit, rest in _AFTER.items())
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_USER = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*"
_NAME = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})*"
_AUTHORITY = rf"//(?:{_USER}@)?(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+)\]|{_NAME})(?::[0-9]*)?"
_PATH = rf"(?:{_AUTHORITY}(?:/{_CHAR}*)*|/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_CHAR}+(?:/{_CHAR}*)*|)"
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+\-.]*"
_RELATIVE = rf"(?:/(?:{_CHAR}+(?:/{_CHAR}*)*)?|{_CHAR.replace('=:@', '=@')}+(?:/{_CHAR}*)*|)"
_TAIL = rf"(?:\?{_REST})?(?:#{_REST})?"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "duration": f"^P(?:(?:{_DAYS})(?:{_HOURS})?|{_HOURS}|[0-9]+W)$",
    "email": rf"^{_WORD}(?:\.{_WORD})*@(?:{_PART}(?:\.{_PART})*|\[{_IPV4}\])$",
    "hostname": f"^{_HOSTNAME}$",
    "idn-email": rf'^[^\x00-\x20"(),:;<>@\[\]\\\uff20]+@{_ANY_LABEL}(?:\.{_ANY_LABEL})*$',
    "idn-hostname": rf"^{_ANY_LABEL}(?:\.{_ANY_LABEL})*$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "uri": f"^{_SCHEME}:{_PATH}{_TAIL}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-reference": rf"^(?:{_SCHEME}:{_PATH}|{_AUTHORITY}(?:/{_CHAR}*)*|{_RELATIVE}){_TAIL}$",
    "uri-template": rf"^(?:{_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "regex": rf"^\^?(?:{_PIECE}|\((?:\?:)?{_PIECE}*(?:\|{_PIECE}+)*\)[*+?]?|\|)*\$?$",
}
_BEYOND_ASCII = r"~\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\u{10000}-\u{1fffd}!"
PATTERNS |= {f"iri{kind}": PATTERNS[f"uri{kind}"].replace("~!", _BEYOND_ASCII) for kind in ("", "-reference")}
