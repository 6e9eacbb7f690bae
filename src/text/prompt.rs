//! Prompts: a recording with its instruction, or a dialogue, as ids (`model.md` §4.6).
//!
//! The file's chat template decides where there is one; else a fixed layout, the one that the
//! published model was trained with.

use minijinja::value::{Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, context};

use super::tokenizer::{Tokenizer, TokenizerError};
use crate::ids::TokenId;

/// What stands for the audio rows in a rendered prompt.
pub const AUDIO: &str = "<|audio|>";
/// The instruction where neither the user nor the file gives one.
pub const INSTRUCTION: &str = "Audio transcription. Language: as spoken. Wording: verbatim, including fillers and \
     repetitions. Formatting: punctuation and capitalization. Output: transcript only.";

/// Steps a template may take: far above any real one, and an end for one that loops.
const TEMPLATE_DEPTH: usize = 200;

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The file's chat template is broken, or wants something that is not there.
    #[error("the chat template fails: {reason}")]
    Template {
        /// What the template engine said, with the place.
        reason: String,
    },
    /// There must be one place for the audio.
    #[error("the prompt has {seen} places for audio ({AUDIO}), wanted 1")]
    AudioPlaces {
        /// How many there are.
        seen: usize,
    },
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Who says something in a dialogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Rules for the whole dialogue.
    System,
    /// The user.
    User,
    /// The model, in an earlier turn.
    Assistant,
}

impl Role {
    /// As templates write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One turn of a dialogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What.
    pub content: String,
}

/// A transcription prompt: ids, then the rows of the recording, then ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TranscriptionPrompt {
    /// Before the audio.
    pub before: Vec<TokenId>,
    /// After the audio.
    pub after: Vec<TokenId>,
}

impl TranscriptionPrompt {
    /// The whole prompt with `rows` placeholders. They have no embedding: the audio rows take their place.
    #[must_use]
    pub fn ids(&self, rows: usize, placeholder: TokenId) -> Vec<TokenId> {
        [&self.before[..], &vec![placeholder; rows], &self.after].concat()
    }

    /// Positions of a prompt with `rows` audio rows.
    #[must_use]
    pub fn len(&self, rows: usize) -> usize {
        self.before.len() + rows + self.after.len()
    }
}

/// Lays out the prompts of one model.
#[derive(Clone, Debug)]
pub struct Prompter {
    tokenizer: Tokenizer,
    template: Option<String>,
    instruction: String,
    /// `bos_token`, `eos_token` for templates that write them out.
    bos: String,
    eos: String,
}

impl Prompter {
    /// A prompter for a file's `provenance.nemotron_transcribe`: `chat_template`,
    /// `processor.default_transcription_prompt`, `bos_token`, `eos_token`, all optional.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, provenance: &serde_json::Value) -> Self {
        let text = |pointer: &str| provenance.pointer(pointer).and_then(|v| v.as_str()).map(str::to_owned);
        Self {
            tokenizer,
            template: text("/chat_template"),
            instruction: text("/processor/default_transcription_prompt").unwrap_or_else(|| INSTRUCTION.into()),
            bos: text("/bos_token").unwrap_or_default(),
            eos: text("/eos_token").unwrap_or_default(),
        }
    }

    /// The tokenizer it uses.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The instruction of a transcription that is given none.
    #[must_use]
    pub fn default_instruction(&self) -> &str {
        &self.instruction
    }

    /// The prompt that asks for a transcript; `instruction` in place of the default one.
    ///
    /// # Errors
    ///
    /// A template that fails or has no single place for the audio, which an instruction that writes
    /// `<|audio|>` itself also leads to.
    pub fn transcription(&self, instruction: Option<&str>) -> Result<TranscriptionPrompt, PromptError> {
        let instruction = instruction.unwrap_or(&self.instruction);
        let text = match &self.template {
            None => layout(&[(Role::User, format!("{instruction}{AUDIO}"))]),
            Some(template) => {
                // Templates of this family take content in parts; older ones only text.
                let parts =
                    Value::from(vec![context! { type => "text", text => instruction }, context! { type => "audio" }]);
                let rendered = self.render(template, &[(Role::User, parts)])?;
                if rendered.contains(AUDIO) {
                    rendered
                } else {
                    let whole = Value::from(format!("{instruction}{AUDIO}"));
                    self.render(template, &[(Role::User, whole)])?
                }
            }
        };
        let places: Vec<&str> = text.split(AUDIO).collect();
        let [before, after] = places[..] else {
            return Err(PromptError::AudioPlaces { seen: places.len() - 1 });
        };
        Ok(TranscriptionPrompt {
            before: self.tokenizer.encode(before, false)?,
            after: self.tokenizer.encode(after, false)?,
        })
    }

    /// A dialogue that waits for the assistant's next turn.
    ///
    /// # Errors
    ///
    /// A template that fails.
    pub fn dialogue(&self, messages: &[Message]) -> Result<Vec<TokenId>, PromptError> {
        let text = match &self.template {
            None => {
                let turns: Vec<_> = messages.iter().map(|m| (m.role, m.content.clone())).collect();
                layout(&turns)
            }
            Some(template) => {
                let turns: Vec<_> = messages.iter().map(|m| (m.role, Value::from(&m.content))).collect();
                self.render(template, &turns)?
            }
        };
        Ok(self.tokenizer.encode(&text, false)?)
    }

    /// Text as it is, with what the tokenizer puts around a whole text.
    ///
    /// # Errors
    ///
    /// A tokenizer that refuses the text.
    pub fn raw(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        Ok(self.tokenizer.encode(text, true)?)
    }

    /// Renders the template as Hugging Face's processors do, with thinking off.
    fn render(&self, template: &str, turns: &[(Role, Value)]) -> Result<String, PromptError> {
        let mut environment = Environment::new();
        let mut syntax = minijinja::syntax::SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| template_error(&error))?);
        environment.set_recursion_limit(TEMPLATE_DEPTH);
        environment.set_unknown_method_callback(python_method);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let turn = |(role, content): &(Role, Value)| context! { role => role.name(), content => content.clone() };
        let messages: Vec<Value> = turns.iter().map(turn).collect();
        let context = context! {
            messages => messages,
            add_generation_prompt => true,
            enable_thinking => false,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        environment.render_str(template, context).map_err(|error| template_error(&error))
    }
}

fn template_error(error: &Error) -> PromptError {
    PromptError::Template { reason: format!("{error:#}") }
}

/// The layout without a template: an empty system turn first unless there is one, thinking closed.
fn layout(turns: &[(Role, String)]) -> String {
    let mut text = String::new();
    if turns.first().is_none_or(|(role, _)| *role != Role::System) {
        text += "<|im_start|>system\n<|im_end|>\n";
    }
    for (role, content) in turns {
        text += &format!("<|im_start|>{}\n{content}<|im_end|>\n", role.name());
    }
    text + "<|im_start|>assistant\n<think></think>"
}

/// The methods of Python's strings and dictionaries that chat templates call.
fn python_method(_: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let unknown = || Error::from(ErrorKind::UnknownMethod);
    if value.kind() == ValueKind::Map {
        return match method {
            "items" => {
                let pairs = value.try_iter()?.map(|key| {
                    let item = value.get_item(&key)?;
                    Ok(Value::from(vec![key, item]))
                });
                pairs.collect::<Result<Vec<_>, Error>>().map(Value::from)
            }
            "keys" => Ok(value.try_iter()?.collect::<Vec<_>>().into()),
            "get" => {
                let (key, default): (Value, Option<Value>) = from_args(args)?;
                let item = value.get_item(&key)?;
                Ok(if item.is_undefined() { default.unwrap_or_else(|| Value::from(())) } else { item })
            }
            _ => Err(unknown()),
        };
    }
    let Some(text) = value.as_str() else { return Err(unknown()) };
    let strip = |args: &[Value]| -> Result<Vec<char>, Error> {
        let (set,): (Option<String>,) = from_args(args)?;
        Ok(set.unwrap_or_else(|| " \t\r\n\x0b\x0c".into()).chars().collect())
    };
    match method {
        "strip" => strip(args).map(|set| Value::from(text.trim_matches(&set[..]))),
        "lstrip" => strip(args).map(|set| Value::from(text.trim_start_matches(&set[..]))),
        "rstrip" => strip(args).map(|set| Value::from(text.trim_end_matches(&set[..]))),
        "startswith" => from_args(args).map(|(start,): (String,)| Value::from(text.starts_with(&start))),
        "endswith" => from_args(args).map(|(end,): (String,)| Value::from(text.ends_with(&end))),
        "lower" => Ok(text.to_lowercase().into()),
        "upper" => Ok(text.to_uppercase().into()),
        "replace" => from_args(args).map(|(from, to): (String, String)| Value::from(text.replace(&from, &to))),
        "split" => {
            let (at,): (Option<String>,) = from_args(args)?;
            let parts: Vec<&str> = match &at {
                None => text.split_whitespace().collect(),
                Some(at) if at.is_empty() => {
                    return Err(Error::new(ErrorKind::InvalidOperation, "split at an empty separator"));
                }
                Some(at) => text.split(at.as_str()).collect(),
            };
            Ok(parts.into_iter().map(Value::from).collect::<Vec<_>>().into())
        }
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendered(template: &str, turns: &[(Role, Value)]) -> Result<String, PromptError> {
        let tokenizer = super::super::tokenizer::tests::bytes();
        let provenance = json!({"bos_token": "<s>"});
        Prompter::new(tokenizer, &provenance).render(template, turns)
    }

    #[test]
    fn templates_see_what_they_expect() {
        let template = "{{ bos_token }}\n    {% for m in messages %}\n{{ m.role }}={{ m['content'].strip() }};\n{% endfor %}\n\
                        {% if not enable_thinking %}quiet{% endif %}";
        let turns = [(Role::System, Value::from(" a ")), (Role::User, Value::from("b\n"))];
        assert_eq!(rendered(template, &turns).unwrap(), "<s>\nsystem=a;\nuser=b;\nquiet");
    }

    #[test]
    fn python_methods_work() {
        let turns = [(Role::User, Value::from("a</think>b"))];
        for (expression, want) in [
            ("messages[0].content.split('</think>')[-1]", "b"),
            ("messages[0].content.startswith('a<')", "True"),
            ("messages[0].content.replace('a', 'xx').upper()", "XX</THINK>B"),
            ("messages[0].get('name', 'none')", "none"),
            ("messages[0].content.rstrip('b>')", "a</think"),
            ("messages[0].items() | length", "2"),
        ] {
            assert_eq!(rendered(&format!("{{{{ {expression} }}}}"), &turns).unwrap(), want, "{expression}");
        }
    }

    #[test]
    fn broken_templates_are_errors() {
        for template in [
            "{% if %}",
            "{{ raise_exception('no audio here') }}",
            "{{ messages[0].content.nonsense() }}",
            "{{ 1 / 0 }}",
        ] {
            let error = rendered(template, &[(Role::User, Value::from("x"))]);
            assert!(matches!(error, Err(PromptError::Template { .. })), "{template}: {error:?}");
        }
        let error = rendered("{{ raise_exception('no audio here') }}", &[]).unwrap_err();
        assert!(error.to_string().contains("no audio here"), "{error}");
    }

    #[test]
    fn the_layout_without_a_template() {
        let prompter = Prompter::new(super::super::tokenizer::tests::bytes(), &json!({}));
        let text = |ids: &[TokenId]| prompter.tokenizer.decode(ids).unwrap();
        let prompt = prompter.transcription(Some("Write it down.")).unwrap();
        assert_eq!(text(&prompt.before), "<|im_start|>system\n\n<|im_start|>user\nWrite it down.");
        assert_eq!(text(&prompt.after), "\n<|im_start|>assistant\n<think></think>");
        let placed = prompt.ids(3, TokenId(258));
        assert_eq!(placed.len(), prompt.len(3));
        assert_eq!(placed[prompt.before.len()..][..3], [TokenId(258); 3]);
        let messages = [
            Message { role: Role::System, content: "Be brief.".into() },
            Message { role: Role::User, content: "Hello".into() },
        ];
        let want = "<|im_start|>system\nBe brief.\n<|im_start|>user\nHello\n<|im_start|>assistant\n<think></think>";
        assert_eq!(text(&prompter.dialogue(&messages).unwrap()), want);
        assert_eq!(text(&prompter.raw("as it is").unwrap()), "as it is");
    }

    #[test]
    fn there_is_one_place_for_audio() {
        let tokenizer = super::super::tokenizer::tests::bytes();
        let prompter = Prompter::new(tokenizer.clone(), &json!({}));
        let twice = prompter.transcription(Some("write <|audio|> down"));
        assert!(matches!(twice, Err(PromptError::AudioPlaces { seen: 2 })), "{twice:?}");
        let deaf = Prompter::new(tokenizer.clone(), &json!({"chat_template": "no content at all"}));
        assert!(matches!(deaf.transcription(None), Err(PromptError::AudioPlaces { seen: 0 })));
        // A template that only knows text gets the placeholder in the text.
        let plain = "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% endif %}{% endfor %}";
        let plain = Prompter::new(tokenizer, &json!({"chat_template": plain}));
        let prompt = plain.transcription(Some("go")).unwrap();
        assert_eq!((prompt.before.len(), prompt.after.len()), (3, 1));
    }
}
