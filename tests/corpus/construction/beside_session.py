from ourtrainers import Session

Session("gpt2").go()
