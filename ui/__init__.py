"""The Textual chat app. It exchanges messages with the engine process (`minillm.service`) and never imports torch.

app.py, engine_app.py   the app; the engine process, notifications, themes, the app's messages
chat_screen.py          the screen: the chat pane, the memory panel, and the keys of both
chat/                   the chat pane (questions, commands, answers), the transcript, conversations as data and on disk
memory/                 the block pool as data, and its six views
bars.py, dialogs.py     the lines at the top and the bottom; the dialogs above the chat
keys_in_order.py        text fields that handle keys in the order in which they were pressed
settings.py             the settings that the user can change
textual_internals.py    all uses of Textual's private names
textual_styles.py       faster styling of widgets
terminal.py             setting up the terminal before the app starts, and restoring it however the app ends
plain.py                the chat line by line, without Textual
"""
