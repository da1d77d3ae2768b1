"""The Textual chat app. It talks to the engine's process by messages (`minillm.service`) and never imports torch.

app.py            the App: owns the engine's process, says how it is, passes events on
screens/          chat (the conversation), and what opens above it: models, sampling, system prompt, help
widgets/          one file per widget; they show what they are given and post messages upwards
conversation.py   the conversation as data        pool.py      the engine's pool of blocks as data
settings.py       what the user can change        markdown.py  Markdown of strangers made harmless
terminal.py       the terminal before and after the app, whatever ends it
"""
