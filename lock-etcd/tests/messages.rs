//! Compares the messages and calls that are written by hand with etcd's published ones, field by field.
//!
//! The messages are private, so the test reads their source.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use prost_reflect::{
    DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
};
use quote::ToTokens as _;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Expr, Field, Fields, Ident, Item, ItemEnum, ItemStruct, Lit, LitStr, Meta, Token, Type,
};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn every_message_and_call_is_etcds() {
    let source = Source::of_this_crate();
    let pool = published();
    assert_eq!(source.differences(&pool), Vec::<String>::new());
    assert!(source.structs.len() > 30, "of {} messages", source.structs.len());
    assert!(source.calls.len() > 8, "of {} calls", source.calls.len());
}

#[test]
fn a_wrong_message_or_call_is_found() {
    let pool = published();
    let field = |text: &str| format!("#[derive(prost::Message)] struct Compare {{ {text} }}");
    for (text, expected) in [
        (field(r#"#[prost(bytes = "vec", tag = "2")] key: Vec<u8>"#), "Compare.key"),
        (field(r#"#[prost(int64, tag = "3")] key: i64"#), "Compare.key"),
        (field(r#"#[prost(bytes = "vec", tag = "3")] other: Vec<u8>"#), "Compare.other"),
        (field(r#"#[prost(bytes = "vec", repeated, tag = "3")] key: Vec<Vec<u8>>"#), "Compare.key"),
        (field(r#"#[prost(enumeration = "Other", tag = "1")] result: i32"#), "Compare.result"),
        (field(r#"#[prost(int64, tag = "4")] version: i64"#), "Compare.version"),
        (
            field(r#"#[prost(oneof = "Target", tags = "4")] target_union: Option<Target>"#)
                + r#"#[derive(prost::Oneof)] enum Target { #[prost(int64, tag = "5")] Version(i64) }"#,
            "Compare.target_union",
        ),
        (
            field(r#"#[prost(oneof = "Target", tags = "4, 5")] target_union: Option<Target>"#)
                + r#"#[derive(prost::Oneof)] enum Target { #[prost(int64, tag = "4")] Version(i64) }"#,
            "Compare.target_union",
        ),
        (
            r#"#[derive(prost::Message)] struct WatchResponse { #[prost(message, repeated, tag = "11")] events: Vec<KeyValue> }"#
                .to_owned(),
            "WatchResponse.events",
        ),
        ("#[derive(prost::Message)] struct Unknown {}".to_owned(), "Unknown"),
        ("#[derive(prost::Enumeration)] enum SortOrder { Ascend = 2 }".to_owned(), "SortOrder.Ascend"),
        (r#"calls! { RangeRequest => PutResponse, "/etcdserverpb.KV/Range"; }"#.to_owned(), "/etcdserverpb.KV/Range"),
        (r#"calls! { RangeRequest => RangeResponse, "/etcdserverpb.KV/No"; }"#.to_owned(), "/etcdserverpb.KV/No"),
        (
            r#"calls! { WatchRequest => WatchResponse, "/etcdserverpb.Watch/Watch"; }"#.to_owned(),
            "/etcdserverpb.Watch/Watch",
        ),
        (r#"const WATCH: &str = "/etcdserverpb.KV/Range";"#.to_owned(), "/etcdserverpb.KV/Range"),
    ] {
        let mut source = Source::default();
        source.add(&text);
        let found = source.differences(&pool);
        assert!(found.len() == 1 && found[0].starts_with(expected), "{text}: {found:?}");
    }
}

/// Returns etcd's published messages.
fn published() -> DescriptorPool {
    let mut compiler = protox::Compiler::new([Path::new(CRATE).join("tests/proto")]).unwrap();
    compiler.include_imports(true).open_file("etcd/api/etcdserverpb/rpc.proto").unwrap();
    compiler.descriptor_pool()
}

/// The items of the source that describe messages and calls.
#[derive(Default)]
struct Source {
    structs: Vec<ItemStruct>,
    oneofs: Vec<ItemEnum>,
    enumerations: Vec<ItemEnum>,
    calls: Vec<Call>,
    /// The paths of calls with streams in both directions.
    streams: Vec<String>,
}

/// A line of the macro `calls!`.
struct Call {
    request: Ident,
    reply: Ident,
    path: String,
}

impl Parse for Call {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let request = input.parse()?;
        input.parse::<Token![=>]>()?;
        let reply = input.parse()?;
        input.parse::<Token![,]>()?;
        let path: LitStr = input.parse()?;
        Ok(Self { request, reply, path: path.value() })
    }
}

impl Source {
    fn of_this_crate() -> Self {
        let mut source = Self::default();
        let folder = Path::new(CRATE).join("src/wire");
        source.add(&fs::read_to_string(folder.with_extension("rs")).unwrap());
        for file in fs::read_dir(folder).unwrap() {
            source.add(&fs::read_to_string(file.unwrap().path()).unwrap());
        }
        source
    }

    fn add(&mut self, text: &str) {
        for item in syn::parse_file(text).unwrap().items {
            match item {
                Item::Struct(item) if derives(&item.attrs, "Message") => self.structs.push(item),
                Item::Enum(item) if derives(&item.attrs, "Oneof") => self.oneofs.push(item),
                Item::Enum(item) if derives(&item.attrs, "Enumeration") => self.enumerations.push(item),
                Item::Macro(item) if item.mac.path.is_ident("calls") => {
                    let calls = Punctuated::<Call, Token![;]>::parse_terminated;
                    self.calls.extend(item.mac.parse_body_with(calls).unwrap());
                }
                Item::Const(item) => {
                    if let Some(path) = text_of(&item.expr).filter(|text| text.starts_with('/')) {
                        self.streams.push(path);
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns a sentence for each difference. It begins with the item.
    fn differences(&self, pool: &DescriptorPool) -> Vec<String> {
        let structs = self.structs.iter().flat_map(|item| self.of_struct(item, pool));
        let enumerations = self.enumerations.iter().flat_map(|item| of_enumeration(item, pool));
        let calls = self.calls.iter().filter_map(|call| of_call(call, pool));
        let streams = self.streams.iter().filter_map(|path| of_stream(path, pool));
        structs.chain(enumerations).chain(calls).chain(streams).collect()
    }

    fn of_struct(&self, item: &ItemStruct, pool: &DescriptorPool) -> Vec<String> {
        let name = item.ident.to_string();
        let Some(message) = message_of(&name, pool) else {
            return vec![format!("{name} is no message of etcd's")];
        };
        let field_of = |field: &Field| {
            let field_name = field.ident.as_ref().unwrap().to_string();
            let written = Written::of(&field.attrs, &field.ty);
            let wrong = match &written.oneof {
                Some(oneof) => self.wrong_oneof(&field_name, oneof, &written.tags, &message),
                None => wrong_field(&plain(&field_name), &written, &message, None),
            };
            wrong.map(|what| format!("{name}.{field_name} {what}"))
        };
        item.fields.iter().filter_map(field_of).collect()
    }

    fn wrong_oneof(
        &self,
        field: &str,
        oneof: &str,
        tags: &[u32],
        message: &MessageDescriptor,
    ) -> Option<String> {
        let Some(item) = self.oneofs.iter().find(|item| item.ident == oneof) else {
            return Some(format!("has no enum {oneof}"));
        };
        let mut seen = Vec::new();
        for variant in &item.variants {
            let Fields::Unnamed(inner) = &variant.fields else {
                return Some("has a variant without a value".into());
            };
            let written = Written::of(&variant.attrs, &inner.unnamed.first().unwrap().ty);
            seen.extend(written.tags.iter().copied());
            // etcd's names have a word more than ours, such as `request_range` and `create_revision`.
            if let Some(wrong) =
                wrong_field(&plain(&variant.ident.to_string()), &written, message, Some(field))
            {
                return Some(format!("has a variant {} that {wrong}", variant.ident));
            }
        }
        (seen != tags).then(|| format!("has the tags {tags:?}, and its enum {seen:?}"))
    }
}

/// The content of a field's attribute.
#[derive(Default)]
struct Written {
    /// The type in the words of etcd's files: a scalar, or the name of a message or an enum.
    kind: String,
    tags: Vec<u32>,
    is_repeated: bool,
    oneof: Option<String>,
}

impl Written {
    fn of(attributes: &[Attribute], of: &Type) -> Self {
        let mut written = Self::default();
        let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("prost")).unwrap();
        let parts = attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap();
        for part in parts {
            let name = part.path().get_ident().unwrap().to_string();
            let value = match &part {
                Meta::NameValue(pair) => text_of(&pair.value),
                _ => None,
            };
            match (name.as_str(), value) {
                ("tag" | "tags", Some(tags)) => {
                    written.tags = tags.split(',').map(|tag| tag.trim().parse().unwrap()).collect();
                }
                ("oneof", Some(name)) => written.oneof = Some(name),
                ("enumeration", Some(name)) => written.kind = name,
                ("repeated", None) => written.is_repeated = true,
                ("message", None) => written.kind = innermost(of),
                ("optional", None) => {}
                _ => written.kind = name,
            }
        }
        written
    }
}

/// Returns the difference of a field and the published field with its tag.
fn wrong_field(
    name: &str,
    written: &Written,
    message: &MessageDescriptor,
    oneof: Option<&str>,
) -> Option<String> {
    let [tag] = written.tags[..] else { return Some("has several tags".into()) };
    let Some(field) = message.get_field(tag) else {
        return Some(format!("has the tag {tag}, which etcd has not"));
    };
    let published = plain(field.name());
    let is_named = if oneof.is_some() { published.contains(name) } else { published == name };
    let group = field.containing_oneof().map(|group| group.name().to_owned());
    let kind = kind_of(&field);
    if !is_named {
        Some(format!("has the tag of {}", field.name()))
    } else if kind != written.kind {
        Some(format!("is {}, and etcd's is {kind}", written.kind))
    } else if field.is_list() != written.is_repeated {
        Some("is repeated on one side alone".into())
    } else if group.as_deref() != oneof {
        Some(format!("belongs to {oneof:?}, and etcd's to {group:?}"))
    } else {
        None
    }
}

fn kind_of(field: &FieldDescriptor) -> String {
    match field.kind() {
        Kind::Message(message) => message.name().to_owned(),
        Kind::Enum(of) => of.name().to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn of_enumeration(item: &ItemEnum, pool: &DescriptorPool) -> Vec<String> {
    let name = item.ident.to_string();
    let Some(published) =
        pool.all_enums().find(|other| is_etcds(other.package_name()) && other.name() == name)
    else {
        return vec![format!("{name} is no enum of etcd's")];
    };
    let wrong = |variant: &syn::Variant| {
        let number = variant.discriminant.as_ref().map(|(_, number)| number.to_token_stream().to_string());
        let number = number.and_then(|number| number.parse().ok());
        (number_of(&published, &variant.ident.to_string()) != number)
            .then(|| format!("{name}.{} has another number", variant.ident))
    };
    item.variants.iter().filter_map(wrong).collect()
}

fn number_of(published: &EnumDescriptor, name: &str) -> Option<i32> {
    published.values().find(|value| plain(value.name()) == plain(name)).map(|value| value.number())
}

fn of_call(call: &Call, pool: &DescriptorPool) -> Option<String> {
    let path = &call.path;
    let Some(method) = method_of(path, pool) else { return Some(format!("{path} is no call of etcd's")) };
    let is_unary = !method.is_client_streaming() && !method.is_server_streaming();
    let has_types = call.request == method.input().name() && call.reply == method.output().name();
    (!is_unary || !has_types).then(|| format!("{path} has other messages, or streams"))
}

fn of_stream(path: &str, pool: &DescriptorPool) -> Option<String> {
    let method = method_of(path, pool);
    let is_stream = method.is_some_and(|method| method.is_client_streaming() && method.is_server_streaming());
    (!is_stream).then(|| format!("{path} is no stream in both directions"))
}

fn method_of(path: &str, pool: &DescriptorPool) -> Option<MethodDescriptor> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    pool.get_service_by_name(service)?.methods().find(|other| other.name() == method)
}

fn message_of(name: &str, pool: &DescriptorPool) -> Option<MessageDescriptor> {
    pool.all_messages().find(|message| is_etcds(message.package_name()) && message.name() == name)
}

fn is_etcds(package: &str) -> bool {
    matches!(package, "etcdserverpb" | "mvccpb")
}

/// Returns a name without the differences of the two languages: `clientURLs` and `client_urls` are the same.
fn plain(name: &str) -> String {
    name.trim_start_matches("r#").replace('_', "").to_lowercase()
}

/// Returns `X` for the types `X`, `Option<X>` and `Vec<X>`.
fn innermost(of: &Type) -> String {
    let text = of.to_token_stream().to_string();
    let inner = text.rsplit('<').next().unwrap_or_default();
    inner.trim_end_matches([' ', '>']).trim().to_owned()
}

fn text_of(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn derives(attributes: &[Attribute], name: &str) -> bool {
    let is_derive = |attribute: &&Attribute| attribute.path().is_ident("derive");
    attributes.iter().filter(is_derive).any(|attribute| {
        let derived =
            attribute.parse_args_with(Punctuated::<syn::Path, Token![,]>::parse_terminated).unwrap();
        derived.iter().any(|path| path.segments.last().is_some_and(|last| last.ident == name))
    })
}
