{{/* Shorter than other names: the label controller-revision-hash of a StatefulSet's pods is its name and 11 characters more. */}}
{{- define "medusa-gateway.redisName" -}}
{{ include "medusa-gateway.fullname" . | trunc 46 | trimAll "-" }}-redis
{{- end }}

{{/* The Secret that holds the bundled server's password. */}}
{{- define "medusa-gateway.redisSecret" -}}
{{- default (include "medusa-gateway.redisName" .) .Values.redis.bundled.passwordSecret.name }}
{{- end }}

{{/* A URL without its password; policy/shared/redis_client.py reads it. Empty: the gateway's own embedded server. */}}
{{- define "medusa-gateway.redisUrl" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "memory" -}}
memory
{{- else if eq $redis.mode "bundled" -}}
redis://{{ include "medusa-gateway.redisName" . }}:6379/0?namespace={{ $redis.namespace }}
{{- else if eq $redis.mode "external" -}}
{{- $external := $redis.external -}}
{{- $scheme := ternary "rediss" "redis" $external.tls.enabled -}}
{{- if ne $external.kind "standalone" }}{{ $scheme = printf "%s+%s" $scheme $external.kind }}{{ end -}}
{{- $path := $external.database | int | toString -}}
{{- if eq $external.kind "sentinel" }}{{ $path = printf "%s/%s" $external.service $path }}{{ end -}}
{{- $user := ternary (printf "%s@" (urlquery $external.username | replace "+" "%20")) "" (ne $external.username "") -}}
{{ $scheme }}://{{ $user }}{{ join "," $external.hosts }}/{{ $path }}?namespace={{ $redis.namespace }}
{{- if $external.tls.caSecret.name }}&ssl_ca_certs=/etc/medusa-gateway/redis-ca/{{ $external.tls.caSecret.key }}{{ end }}
{{- end }}
{{- end }}

{{/* Secrets come by reference only, and a password apart from its URL. */}}
{{- define "medusa-gateway.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- if and (eq $redis.mode "external") $redis.external.urlSecret.name }}
- name: MEDUSA_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ $redis.external.urlSecret.name | quote }}, key: {{ $redis.external.urlSecret.key | quote }}}
{{- else if ne $redis.mode "embedded" }}
- name: MEDUSA_REDIS_URL
  value: {{ include "medusa-gateway.redisUrl" . | quote }}
{{- end }}
{{- if eq $redis.mode "bundled" }}
- name: MEDUSA_REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "medusa-gateway.redisSecret" . | quote }}, key: {{ $redis.bundled.passwordSecret.key | quote }}}
{{- else if and (eq $redis.mode "external") $redis.external.passwordSecret.name }}
- name: MEDUSA_REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $redis.external.passwordSecret.name | quote }}, key: {{ $redis.external.passwordSecret.key | quote }}}
{{- end }}
{{- end }}

{{- define "medusa-gateway.redisCa" -}}
{{- if eq .Values.redis.mode "external" }}{{ .Values.redis.external.tls.caSecret.name }}{{ end }}
{{- end }}
