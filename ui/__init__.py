"""The Textual chat app. It talks to the engine's process by messages (`minillm.service`) and never imports torch.

app.py, engine_app.py   the app: how it starts and ends; the engine's process, the settings, notifications
chat/                   the screen, the talk (questions, commands, answers), the conversation as data and on disk
memory/                 the pool of blocks as data, and the six views of it
dialogs/                what opens above the chat
bars/                   the lines at the top and the bottom
settings.py             what the user can change, and the configuration file
textual_internals.py    the private names of Textual, all of them
terminal.py             the terminal before and after the app, whatever ends it
plain.py                the chat line by line, without Textual
"""
